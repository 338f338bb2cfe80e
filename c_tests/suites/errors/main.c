// Provokes every refusal of docs/errors.md, one by one. Checks the result, the whole text, that
// nothing was written, and that the group works afterwards. tests/error_docs.rs compares the table,
// the library's sources and these programs, so none is forgotten.
#include "suites/errors/errors.h"

int main(int argc, char** argv) {
    // The cases of stderr.c start this program again to see the library's stderr alone.
    if (argc == 2 && strcmp(argv[1], "--refuse-once") == 0) return refuse_once();
    if (argc == 2 && strcmp(argv[1], "--make-groups") == 0) return make_groups();
    if (argc == 2 && strcmp(argv[1], "--fail-and-be-refused") == 0) return fail_and_be_refused();
    if (argc == 2 && strcmp(argv[1], "--pass-over") == 0) return pass_over_choices();
    return ep_main(argc, argv);
}

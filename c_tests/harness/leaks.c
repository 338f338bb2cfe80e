// The leak check of a sanitizer build. It runs before MPI_Finalize: after it Open MPI's plug-ins are unloaded, and what
// they keep could no longer be told from a leak of the library or of the test.
#include "base.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>

// Weak defaults; the environment's ASAN_OPTIONS and LSAN_OPTIONS win. The slow unwinder would take half of
// a run's time. The quick one knows of a library without frame pointers only who called malloc: enough for
// the suppressions below, but for what a library of C allocates in its name, which MPI_Init alone loses.
const char* __asan_default_options(void);
const char* __asan_default_options(void) { return "leak_check_at_exit=0:detect_stack_use_after_return=1"; }

const char* __lsan_default_options(void);
const char* __lsan_default_options(void) { return "print_suppressions=0"; }

const char* __lsan_default_suppressions(void);
const char* __lsan_default_suppressions(void) {
    return "leak:libmpi\nleak:libopen-rte\nleak:libopen-pal\nleak:mca_\nleak:libpmix\nleak:"
           "libevent\nleak:libhwloc\nleak:libltdl\n";
}

void ep_init_unwatched(int* argc, char*** argv) {
    __lsan_disable();
    MPI_Init(argc, argv);
    __lsan_enable();
}

bool ep_has_leaks(void) { return __lsan_do_recoverable_leak_check() != 0; }
#else
void ep_init_unwatched(int* argc, char*** argv) { MPI_Init(argc, argv); }
bool ep_has_leaks(void) { return false; }
#endif

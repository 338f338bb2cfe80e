// Provokes every refusal of docs/errors.md, one by one. Checks the result, the whole text, that
// nothing was written, and that the group works afterwards. tests/error_docs.rs compares the table,
// the library's sources and these programs, so none is forgotten.
#include "suites/errors/errors.h"

#include <string.h>

int main(int argc, char** argv) {
    // one_line_on_stderr starts this program again to see the library's stderr alone.
    if (argc == 2 && strcmp(argv[1], "--refuse-once") == 0) return refuse_once();
    static const EpCase cases[] = {
        EP_CASE(group_arguments),
        EP_CASE(group_differences_between_ranks),
        EP_CASE(group_refused_by_one_rank),
        EP_CASE(group_with_a_missing_rank),
        EP_CASE(group_over_several_nodes),
        EP_CASE(tensor_arguments),
        EP_CASE(tensor_callbacks_that_fail),
        EP_CASE(dead_and_foreign_objects),
        EP_CASE(places_for_results),
        EP_CASE_HT(ht_place_for_a_result),
        EP_CASE(ll_handle_arguments),
        EP_CASE_HT(ht_handle_arguments),
        EP_CASE_HT(ht_handle_refused_by_one_rank),
        EP_CASE_HT(ht_handle_with_another_top_k),
        EP_CASE_HT(ht_handle_without_a_count),
        EP_CASE_HT(ht_handle_used_before_it_is_known),
        EP_CASE_HT(ht_handle_with_a_missing_rank),
        EP_CASE_HT(ht_handle_after_one_rank_failed),
        EP_CASE(ll_lists_of_tensors),
        EP_CASE_HT(ht_lists_of_tensors),
        EP_CASE(ll_dispatch_arguments),
        EP_CASE(ll_combine_arguments),
        EP_CASE(ll_order_of_calls),
        EP_CASE_HT(ht_dispatch_arguments),
        EP_CASE_HT(ht_combine_arguments),
        EP_CASE(ll_scales_arguments),
        EP_CASE_HT(ht_scales_arguments),
        EP_CASE_HT(ht_outputs_too_small),
        EP_CASE(ll_different_calls_on_one_rank),
        EP_CASE_HT(ht_different_calls_on_one_rank),
        EP_CASE(ll_scales_that_differ),
        EP_CASE_HT(ht_scales_that_differ),
        EP_CASE(ll_repeated_ids_overfill_an_expert),
        EP_CASE(ll_rank_that_stops),
        EP_CASE_HT(ht_rank_that_stops),
        EP_CASE(ll_different_calls_over_nodes),
        EP_CASE_HT(ht_different_calls_over_nodes),
        EP_CASE(ll_new_handle_held_up_over_nodes),
        EP_CASE_HT(ht_handle_without_memory_over_nodes),
        EP_CASE(forked_process),
        EP_CASE(ll_unusual_numbers_are_told),
        EP_CASE_HT(ht_unusual_numbers_are_told),
        EP_CASE(nothing_is_checked_unasked),
        EP_CASE(one_line_on_stderr),
        EP_CASE(print_skipped),
    };
    return ep_main(argc, argv, cases, COUNT(cases));
}

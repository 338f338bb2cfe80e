// Cases of test_graph outside of main.c.
#ifndef C_TESTS_SUITES_GRAPH_CASES_H_
#define C_TESTS_SUITES_GRAPH_CASES_H_

#include "harness/harness.h"

void two_captures_in_turns(EpEnv* env);
void captured_beside_a_staged_one(EpEnv* env);
void a_send_that_never_ran(EpEnv* env);
void two_open_captures(EpEnv* env);
void beside_an_open_capture(EpEnv* env);
void one_open_capture_too_many(EpEnv* env);
void ht_two_open_captures(EpEnv* env);
void ht_beside_an_open_capture(EpEnv* env);
void calls_in_a_capture(EpEnv* env);
void calls_beside_a_capture(EpEnv* env);
void rows_with_scales(EpEnv* env);
void groups_end_before_their_graphs(EpEnv* env);
void a_group_ends_beside_a_capture(EpEnv* env);
void ht_dispatches_and_combines(EpEnv* env);
void ht_rows_with_scales(EpEnv* env);
void ht_between_direct_operations(EpEnv* env);
void ht_handle_in_a_capture(EpEnv* env);

#endif  // C_TESTS_SUITES_GRAPH_CASES_H_

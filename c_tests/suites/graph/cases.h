// Cases of test_graph outside of main.c.
#ifndef C_TESTS_SUITES_GRAPH_CASES_H_
#define C_TESTS_SUITES_GRAPH_CASES_H_

#include "harness/harness.h"

// Begins a capture. Where nothing can be captured: counts a skip and returns false.
bool graph_begin_capture(cudaStream_t stream);

void two_captures_in_turns(EpEnv* env);
void captured_beside_a_staged_one(EpEnv* env);
void ht_handle_in_a_capture(EpEnv* env);

#endif  // C_TESTS_SUITES_GRAPH_CASES_H_

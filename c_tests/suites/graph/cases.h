// Cases of test_graph outside of main.c.
#ifndef C_TESTS_SUITES_GRAPH_CASES_H_
#define C_TESTS_SUITES_GRAPH_CASES_H_

#include "harness/harness.h"

void ht_handle_in_a_capture(EpEnv* env);

#endif  // C_TESTS_SUITES_GRAPH_CASES_H_

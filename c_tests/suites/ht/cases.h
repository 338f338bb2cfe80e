// The cases of test_ht that are in files of their own.
#ifndef C_TESTS_SUITES_HT_CASES_H_
#define C_TESTS_SUITES_HT_CASES_H_

#include "harness/harness.h"

// Sequences of operations (order.c).
void ht_repeated_dispatches(EpEnv* env);
void ht_combine_without_dispatch(EpEnv* env);
void ht_interleaved_handles(EpEnv* env);
void ht_interleaved_groups(EpEnv* env);
void ht_unordered_streams(EpEnv* env);
void ht_without_a_pause(EpEnv* env);

// Sums that do not depend on a token's home (homes.c).
void ht_bits_from_any_home(EpEnv* env);

// Outputs and inputs with fewer rows than were received (too_small.c).
void ht_token_output_too_small(EpEnv* env);
void ht_routing_output_too_small(EpEnv* env);
void ht_outputs_without_rows(EpEnv* env);
void ht_combine_input_too_small(EpEnv* env);

// Work enqueued behind a failure (failed.c).
void ht_nothing_runs_behind_a_failure(EpEnv* env);

#endif  // C_TESTS_SUITES_HT_CASES_H_

// The cases of test_ll that are in files of their own.
#ifndef C_TESTS_SUITES_LL_CASES_H_
#define C_TESTS_SUITES_LL_CASES_H_

#include "harness/harness.h"

// Orders of operations (order.c).
void ll_repeated_dispatches(EpEnv* env);
void ll_repeated_combines(EpEnv* env);
void ll_ids_updated_in_place(EpEnv* env);
void ll_ids_masked_before_combine(EpEnv* env);
void ll_interleaved_handles(EpEnv* env);
void ll_interleaved_groups(EpEnv* env);
void ll_two_streams(EpEnv* env);
void ll_unordered_streams(EpEnv* env);
void ll_thousand_operations(EpEnv* env);

// Ids that changed between dispatch and combine (permuted.c).
void ll_weights_follow_their_ids(EpEnv* env);
void ll_ids_permuted_before_combine(EpEnv* env);

#endif  // C_TESTS_SUITES_LL_CASES_H_

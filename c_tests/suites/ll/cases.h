// The cases of test_ll that are in files of their own.
#ifndef C_TESTS_SUITES_LL_CASES_H_
#define C_TESTS_SUITES_LL_CASES_H_

#include "harness/harness.h"

// Sequences of operations (order.c).
void ll_repeated_operations(EpEnv* env);
void ll_ids_updated_in_place(EpEnv* env);
void ll_ids_masked_before_combine(EpEnv* env);
void ll_interleaved_handles(EpEnv* env);
void ll_interleaved_groups(EpEnv* env);
void ll_unordered_streams(EpEnv* env);
void ll_thousand_operations(EpEnv* env);
void ll_handle_while_a_dispatch_waits(EpEnv* env);
void ll_handle_ends_before_its_operation(EpEnv* env);

// Ids that change between dispatch and combine (permuted.c).
void ll_weights_follow_their_ids(EpEnv* env);
void ll_ids_permuted_before_combine(EpEnv* env);

// Sums that do not depend on a token's home (homes.c).
void ll_bits_from_any_home(EpEnv* env);

// Collectives of the caller on another stream (beside.c).
void ll_beside_collectives(EpEnv* env);

// Failures that not all ranks know of yet (failed.c).
void ll_nothing_is_sent_behind_a_failure(EpEnv* env);
void ll_no_sum_is_sent_without_its_weights(EpEnv* env);
void ll_nothing_is_sent_to_a_bank_in_use(EpEnv* env);

#endif  // C_TESTS_SUITES_LL_CASES_H_

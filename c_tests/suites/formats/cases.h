// What the files of test_formats share.
#ifndef C_TESTS_SUITES_FORMATS_CASES_H_
#define C_TESTS_SUITES_FORMATS_CASES_H_

#include "harness/harness.h"

// Some ranks cast, the others forward (mixed.c).
void casts_on_some_ranks(EpEnv* env);
void casts_on_some_ranks_ht(EpEnv* env);

#endif  // C_TESTS_SUITES_FORMATS_CASES_H_

// The data that ep_test sends and the checks of what arrives: every element of every row that the
// routing calls valid, where the reference's program looks at the first ten.
#ifndef C_TESTS_PROGRAMS_EP_TEST_CHECKS_H_
#define C_TESTS_PROGRAMS_EP_TEST_CHECKS_H_

#include <stdint.h>

#include <vector>

#include "harness/harness.h"
#include "programs/ep_test/routing.h"

namespace ep_test {

// A token of `rank`: ten elements with the raw bits 0x1000 + rank, then zeros. [tokens, hidden]
std::vector<uint16_t> SentTokens(unsigned rank, unsigned tokens, unsigned hidden);

// What the experts hand back: 2, 4, ... 20 as bfloat16, then zeros, in valid rows; NaN in all
// others, which must not reach any result.
std::vector<uint16_t> ExpertOutputsLl(const Routing& routing, unsigned rank, unsigned slots,
                                      unsigned hidden);
std::vector<uint16_t> ExpertOutputsHt(const Routing& routing, unsigned rank, unsigned rows,
                                      unsigned hidden);

void CheckDispatchLl(const Routing& routing, unsigned rank, const ncclNDTensor_t& tokens,
                     const ncclNDTensor_t& counter);
void CheckDispatchHt(const Routing& routing, unsigned rank, const ncclNDTensor_t& tokens,
                     const ncclNDTensor_t& weights, const ncclNDTensor_t& ids);

// Low latency weights the copies with 1/top-k: the experts' row comes back. High throughput adds
// one row for each rank that the token went to.
void CheckCombine(const Routing& routing, unsigned rank, bool low_latency,
                  const ncclNDTensor_t& combined);

void CheckSameBytes(const ncclNDTensor_t& actual, const ncclNDTensor_t& expected);
void CheckAllEqual(const ncclNDTensor_t& floats, float expected);

}  // namespace ep_test

#endif  // C_TESTS_PROGRAMS_EP_TEST_CHECKS_H_

// Which token goes to which expert in ep_test. Every process computes the routing of all ranks, so
// the expectation involves no message and no call of the library.
#pragma once

#include "reference/owned.hpp"

namespace ep_test {

// Every token goes to the experts of the next rank or, if `random`, to consecutive experts from a random first one.
// top-k is the largest power of two up to min(8, ranks), and every rank has top-k experts. For 2, 4, 8, 16 and 32 ranks
// these are the choices and seeds of the reference's program, so that a configuration means the same routing in both.
ref::Routing MakeRouting(unsigned ranks, unsigned tokens, bool random);

}  // namespace ep_test

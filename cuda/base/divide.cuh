// Division by a number that the launch knows: a product and one step of correction, in a quarter of the code of a
// division. `reciprocal` is 2^32 / by, rounded down (cuda/params/src/ll.rs).
#pragma once

#include "primitive.cuh"

namespace nccl_ep {

struct Divided {
    uint32_t quotient;
    uint32_t remainder;
};

__device__ __forceinline__ Divided divide(uint32_t number, uint32_t by, uint32_t reciprocal) {
    // Too small by one at most.
    const uint32_t quotient = static_cast<uint32_t>(uint64_t{number} * reciprocal >> 32);
    const uint32_t remainder = number - quotient * by;
    return remainder < by ? Divided{quotient, remainder} : Divided{quotient + 1, remainder - by};
}

}  // namespace nccl_ep

// Random numbers for the C++ programs, drawn from a seed.
#pragma once

#include "harness/harness.h"

namespace ep {

class Dice {
   public:
    explicit Dice(uint64_t seed) : state_(seed) {}
    unsigned Below(unsigned bound) { return static_cast<unsigned>(ep_random_below(&state_, bound)); }
    unsigned Between(unsigned low, unsigned high) { return low + Below(high - low + 1); }
    bool OneIn(unsigned n) { return Below(n) == 0; }
    uint64_t Seed() { return ep_random(&state_); }
    template <typename T, unsigned kCount>
    const T& Pick(const T (&items)[kCount]) {
        return items[Below(kCount)];
    }

   private:
    uint64_t state_;
};

}  // namespace ep

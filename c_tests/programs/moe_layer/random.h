// Random numbers for the model of moe_layer.
//
// Every weight and every embedding is a function of a key (seed, kind, index), never of the order
// in which ranks ask for it. So one rank can rebuild any part of the model and check the others.
#pragma once

#include <cmath>
#include <cstdint>

#include "harness/harness.h"

namespace moe {

// The random sequence of one key of three numbers.
class RandomStream {
   public:
    RandomStream(uint64_t a, uint64_t b, uint64_t c) : state_(ep_mix(a, b, c)) {}

    // Uniform in [-limit, limit).
    float Uniform(float limit) { return limit * static_cast<float>(2.0 * ep_random_unit(&state_) - 1.0); }

    // Standard normal, by the Box-Muller transform; 1 - u is never 0.
    float Normal() {
        const double radius = std::sqrt(-2.0 * std::log(1.0 - ep_random_unit(&state_)));
        return static_cast<float>(radius * std::cos(kTwoPi * ep_random_unit(&state_)));
    }

   private:
    static constexpr double kTwoPi = 6.283185307179586;

    uint64_t state_;
};

}  // namespace moe

// A small random generator: each block has its own, so that a seed names a schedule.
#pragma once

#include <cstdint>

namespace simt {

class Random {
   public:
    explicit Random(uint64_t seed) : state_(seed) {}

    // splitmix64
    uint64_t Next() {
        uint64_t mixed = state_ += 0x9e3779b97f4a7c15u;
        mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
        mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
        return mixed ^ (mixed >> 31);
    }
    // A number below `bound`, which is less than 2^32. Not by a division, as every step of a block asks.
    uint64_t Below(uint64_t bound) { return (Next() >> 32) * bound >> 32; }
    bool OneIn(uint64_t n) { return Below(n) == 0; }

   private:
    uint64_t state_;
};

}  // namespace simt

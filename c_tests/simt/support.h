// What all of the shim uses: its end on a broken rule, its settings, its random numbers.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

namespace simt {

// What the shim does about a kernel that breaks a rule of CUDA: prints "simt: `text`" on stderr, with the block and
// thread that runs, if one does, and aborts. Nothing after that would mean anything.
[[noreturn]] void Fail(const std::string& text);

// `name` gives the block and thread that the calling OS thread runs; an empty text if it runs none.
void NameRunningThreadBy(std::string (*name)());

// A variable of the environment that is a number (README.md lists them); `otherwise` where it is not set.
inline uint64_t Setting(const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    if (text == nullptr) return otherwise;
    char* end = nullptr;
    const uint64_t value = std::strtoull(text, &end, 10);
    if (end == text || *end != '\0') Fail(std::string(name) + ": must be a number (got " + text + ")");
    return value;
}

// A small random generator: each block has its own, so that a seed names a schedule.
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

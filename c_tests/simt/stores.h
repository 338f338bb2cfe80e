// Stores of a block that nobody outside of it sees yet.
//
// A GPU may show a relaxed store to others late, and in any order with other stores, until whoever made it, or whom a
// barrier has joined to that thread since, makes a release. Here they are held back just so; a missing barrier or
// release then shows as stale data. The block itself sees its stores at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <unordered_map>
#include <vector>

#include "support.h"

namespace simt {

// When a store becomes visible without a release.
enum class Landing {
    kSomeTime,  // at a random time, at the end of the kernel at the latest
    kAtEnd,     // at the end of the kernel
};

class Stores {
   public:
    Stores(uint32_t threads, Random& random);

    // Holds back a store of `size` bytes that do not cross a multiple of 16. What is visible as a
    // whole or not at all are pieces of `piece` bytes: 4 or 8.
    void Put(uint32_t thread, void* to, const void* bytes, std::size_t size, std::size_t piece, Landing landing);
    // Puts what is held back for these addresses over `bytes`, which were read from memory.
    void Overlay(const void* from, void* bytes, std::size_t size) const;
    // Makes what is held back for this address visible, before an atomic operation there.
    void LandAt(const void* address);

    // `thread` arrives at a warp operation, or at a barrier of the block.
    void MeetWarp(uint32_t thread) { Move(of_thread_[thread], of_warp_[thread / kLanes]); }
    void MeetBlock(uint32_t thread);
    // Makes visible what happened before this point of `thread`.
    void Release(uint32_t thread);
    // A step of the block's scheduler: some of those that land at some time may do so.
    void Step();
    // The same, when all threads of the block only wait.
    void LandSome();
    void LandAll();
    // Of all stores so far.
    uint64_t count() const { return next_number_; }

   private:
    static constexpr std::size_t kUnit = 16;
    static constexpr uint32_t kLanes = 32;
    struct Entry {
        uint8_t bytes[kUnit];
        uint32_t held;   // a bit per byte
        uint32_t piece;  // bytes
        uint64_t number;
    };
    // The number tells whether the entry is still the one that was meant.
    struct Name {
        uintptr_t unit;
        uint64_t number;
    };
    using Names = std::vector<Name>;

    void Land(uintptr_t unit, Entry& entry, uint32_t which) const;
    void LandNamed(Names& names);
    static void Move(Names& from, Names& to) {
        if (!from.empty()) {  // as mostly
            to.insert(to.end(), from.begin(), from.end());
            from.clear();
        }
    }

    Random& random_;
    const uint64_t one_in_steps_;
    uint64_t next_number_ = 0;
    std::pmr::unordered_map<uintptr_t, Entry> entries_;
    Names some_time_;
    std::vector<Names> of_thread_;
    std::vector<Names> of_warp_;
    Names of_block_;
};

}  // namespace simt

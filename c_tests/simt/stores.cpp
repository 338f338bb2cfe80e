// Where held back stores are kept and when they land.
#include "stores.h"

#include <unistd.h>

#include <cstring>
#include <iterator>

#include "support.h"

namespace simt {
namespace {

// Of the stores that wait, up to one in so many lands at a time, and a few more.
constexpr uint64_t kOneInAtOnce = 4;
constexpr uint64_t kMoreAtOnce = 8;
// Whether some land with a step of the block's scheduler: always, with one step of so many, or never,
// so that everything waits until the block has nothing to do. A block has one of these ways.
constexpr uint64_t kOneInSteps[] = {1, 64, 0};

// An OS thread's blocks have their entries here, one block after the other.
std::pmr::memory_resource* Pool() {
    static thread_local std::pmr::unsynchronized_pool_resource pool;
    return &pool;
}

uint32_t BytesMask(std::size_t offset, std::size_t size) { return ((1u << size) - 1) << offset; }

}  // namespace

Stores::Stores(uint32_t threads, Random& random)
    : random_(random), one_in_steps_(kOneInSteps[random.Below(std::size(kOneInSteps))]),
      entries_(Pool()), of_thread_(threads), of_warp_((threads + kLanes - 1) / kLanes) {}

void Stores::Put(uint32_t thread, void* to, const void* bytes, std::size_t size, std::size_t piece, Landing landing) {
    const auto address = reinterpret_cast<uintptr_t>(to);
    const std::size_t offset = address % kUnit;
    if (address % size != 0) Fail("a store of " + std::to_string(size) + " bytes is misaligned");
    const auto [found, is_first] = entries_.try_emplace(address - offset);
    Entry& entry = found->second;
    if (!is_first) Land(found->first, entry, entry.held);  // two stores to one address keep their order
    std::memcpy(entry.bytes + offset, bytes, size);
    entry.held = BytesMask(offset, size);
    entry.piece = static_cast<uint32_t>(piece);
    entry.number = ++next_number_;
    const Name name = {address - offset, entry.number};
    of_thread_[thread].push_back(name);
    if (landing == Landing::kSomeTime) some_time_.push_back(name);
}

void Stores::Overlay(const void* from, void* bytes, std::size_t size) const {
    if (entries_.empty()) {
        return;
    }
    const auto address = reinterpret_cast<uintptr_t>(from);
    const std::size_t offset = address % kUnit;
    const auto found = entries_.find(address - offset);
    if (found == entries_.end()) {
        return;
    }
    for (std::size_t i = 0; i < size; ++i) {
        if ((found->second.held >> (offset + i) & 1) != 0) {
            static_cast<uint8_t*>(bytes)[i] = found->second.bytes[offset + i];
        }
    }
}

void Stores::LandAt(const void* address) {
    if (entries_.empty()) {
        return;
    }
    const auto number = reinterpret_cast<uintptr_t>(address);
    const auto found = entries_.find(number - number % kUnit);
    if (found != entries_.end()) {
        Land(found->first, found->second, found->second.held);
        entries_.erase(found);
    }
}

void Stores::MeetBlock(uint32_t thread) {
    Move(of_thread_[thread], of_block_);
    Move(of_warp_[thread / kLanes], of_block_);
}

void Stores::Release(uint32_t thread) {
    LandNamed(of_thread_[thread]);
    LandNamed(of_warp_[thread / kLanes]);
    LandNamed(of_block_);
}

void Stores::Step() {
    if (!some_time_.empty() && one_in_steps_ != 0 && random_.OneIn(one_in_steps_)) LandSome();
}

void Stores::LandSome() {
    constexpr uint64_t kOneInTorn = 4;
    const uint64_t most = some_time_.size() / kOneInAtOnce + kMoreAtOnce;
    for (uint64_t count = random_.Below(most + 1); count != 0; --count) {
        if (some_time_.empty()) {
            return;
        }
        Name& chosen = some_time_[random_.Below(some_time_.size())];
        const auto found = entries_.find(chosen.unit);
        if (found != entries_.end() && found->second.number == chosen.number) {
            Entry& entry = found->second;
            if (random_.OneIn(kOneInTorn)) {  // one piece only; the rest comes later
                const std::size_t at = random_.Below(kUnit / entry.piece) * entry.piece;
                Land(found->first, entry, entry.held & BytesMask(at, entry.piece));
            } else {
                Land(found->first, entry, entry.held);
            }
            if (entry.held != 0) continue;
            entries_.erase(found);
        }
        chosen = some_time_.back();
        some_time_.pop_back();
    }
}

void Stores::LandAll() {
    while (!some_time_.empty()) {
        LandSome();
        usleep(1);  // others may see the one and not yet the other
    }
    for (auto& [unit, entry] : entries_) Land(unit, entry, entry.held);
    entries_.clear();
}

// Writes the held bytes of `which`, a piece at a time, and takes them off the entry.
void Stores::Land(uintptr_t unit, Entry& entry, uint32_t which) const {
    for (std::size_t at = 0; at < kUnit; at += entry.piece) {
        if ((which >> at & 1) == 0) continue;
        if (entry.piece == sizeof(uint64_t)) {
            uint64_t value;
            std::memcpy(&value, entry.bytes + at, sizeof(value));
            __atomic_store_n(reinterpret_cast<uint64_t*>(unit + at), value, __ATOMIC_RELEASE);
        } else {
            uint32_t value;
            std::memcpy(&value, entry.bytes + at, sizeof(value));
            __atomic_store_n(reinterpret_cast<uint32_t*>(unit + at), value, __ATOMIC_RELEASE);
        }
    }
    entry.held &= ~which;
}

void Stores::LandNamed(Names& names) {
    for (const Name& name : names) {
        const auto found = entries_.find(name.unit);
        if (found != entries_.end() && found->second.number == name.number) {
            Land(name.unit, found->second, found->second.held);
            entries_.erase(found);
        }
    }
    names.clear();
}

}  // namespace simt

// The rules of bulk copies and mbarriers.
#include "bulk.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "support.h"

namespace simt {
namespace {

constexpr uint32_t kUnit = 16;

void CheckCopy(const void* to, const void* from, uint32_t bytes) {
    const auto addresses = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
    if (addresses % kUnit != 0 || bytes % kUnit != 0 || bytes == 0) {
        Fail("a bulk copy of " + std::to_string(bytes) +
             " bytes: addresses and size must be multiples of 16, the size not 0");
    }
}

}  // namespace

void Bulk::InitBarrier(const uint64_t* barrier, uint32_t arrivals) {
    if (arrivals == 0) Fail("an mbarrier for no arrivals");
    const auto found = barriers_.find(barrier);
    if (found != barriers_.end() && !found->second.loads.empty()) {
        Fail("an mbarrier is initialised while bulk copies to it are under way");
    }
    barriers_[barrier] = {arrivals, arrivals, 0, 0, {}};
}

void Bulk::ArriveExpecting(const uint64_t* barrier, uint32_t bytes) {
    Barrier& found = Find(barrier);
    if (found.pending == 0) Fail("more arrivals at an mbarrier than it was initialised for");
    found.bytes += bytes;
    --found.pending;
    EndPhaseIfComplete(found);
}

bool Bulk::HasEnded(const uint64_t* barrier, uint32_t parity) {
    Barrier& found = Find(barrier);
    if (!found.loads.empty() && random_.OneIn(2)) LandLoad(found, random_.Below(found.loads.size()));
    return found.phase % 2 != parity;
}

void Bulk::Load(void* shared_to, const void* from, uint32_t bytes, const uint64_t* barrier) {
    CheckCopy(shared_to, from, bytes);
    Barrier& found = Find(barrier);
    found.loads.push_back({static_cast<uint8_t*>(shared_to), static_cast<const uint8_t*>(from), bytes});
    if (random_.OneIn(3)) LandLoad(found, found.loads.size() - 1);
}

void Bulk::Store(uint32_t thread, void* to, const void* shared_from, uint32_t bytes) {
    CheckCopy(to, shared_from, bytes);
    Group& open = threads_[thread].open;
    open.push_back({static_cast<uint8_t*>(to), static_cast<const uint8_t*>(shared_from), bytes});
    if (random_.OneIn(3)) Read(open.back());
}

void Bulk::CommitStores(uint32_t thread) {
    Thread& own = threads_[thread];
    own.committed.push_back(std::move(own.open));
    own.open.clear();
}

void Bulk::WaitUntilRead(uint32_t thread, uint32_t groups) {
    std::deque<Group>& committed = threads_[thread].committed;
    for (std::size_t i = 0; i + groups < committed.size(); ++i) {
        for (Copy& copy : committed[i]) Read(copy);
    }
}

void Bulk::WaitUntilWritten(uint32_t thread, uint32_t groups) {
    std::deque<Group>& committed = threads_[thread].committed;
    while (committed.size() > groups) {
        for (Copy& copy : committed.front()) {
            Read(copy);
            for (uint32_t at = 0; at < copy.bytes; at += kUnit) {
                stores_.Put(thread, copy.to + at, &copy.data[at], kUnit, sizeof(uint32_t), Landing::kSomeTime);
            }
        }
        committed.pop_front();
    }
}

void Bulk::LoadForThread(uint32_t thread, void* shared_to, const void* from) {
    CheckCopy(shared_to, from, kUnit);
    threads_[thread].open_loads.push_back({static_cast<uint8_t*>(shared_to), static_cast<const uint8_t*>(from), kUnit});
}

void Bulk::CommitLoads(uint32_t thread) {
    Thread& own = threads_[thread];
    own.loads.push_back(std::move(own.open_loads));
    own.open_loads.clear();
    // Later groups may end first.
    if (random_.OneIn(3)) {
        for (const Copy& copy : std::exchange(own.loads.back(), {})) {
            std::memcpy(copy.to, copy.from, copy.bytes);
        }
    }
}

void Bulk::WaitUntilLoaded(uint32_t thread, uint32_t groups) {
    std::deque<Group>& loads = threads_[thread].loads;
    while (loads.size() > groups) {
        for (const Copy& copy : loads.front()) {
            std::memcpy(copy.to, copy.from, copy.bytes);
        }
        loads.pop_front();
    }
}

void Bulk::Finish() {
    for (const auto& [address, barrier] : barriers_) {
        if (!barrier.loads.empty()) {
            Fail("a block ended while bulk copies into its shared memory were under way");
        }
    }
    for (auto& [number, thread] : threads_) {
        const auto is_under_way = [](const Group& group) { return !group.empty(); };
        if (std::any_of(thread.loads.begin(), thread.loads.end(), is_under_way) || !thread.open_loads.empty()) {
            Fail("a block ended while loads into its shared memory were under way");
        }
        if (!thread.open.empty()) Fail("a block ended with bulk stores that were never committed");
        for (const Group& group : thread.committed) {
            for (const Copy& copy : group) {
                if (!copy.has_read) Fail("a block ended before it waited until its bulk stores had read");
            }
        }
        WaitUntilWritten(number, 0);
    }
}

Bulk::Barrier& Bulk::Find(const uint64_t* barrier) {
    const auto found = barriers_.find(barrier);
    if (found == barriers_.end()) Fail("an mbarrier is used that was not initialised");
    return found->second;
}

void Bulk::Read(Copy& copy) {
    if (!copy.has_read) {
        copy.data.assign(copy.from, copy.from + copy.bytes);
        copy.has_read = true;
    }
}

void Bulk::EndPhaseIfComplete(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.pending = barrier.arrivals;
        ++barrier.phase;
    }
}

void Bulk::LandLoad(Barrier& barrier, std::size_t index) {
    Copy& copy = barrier.loads[index];
    std::memcpy(copy.to, copy.from, copy.bytes);
    barrier.bytes -= copy.bytes;
    std::swap(copy, barrier.loads.back());
    barrier.loads.pop_back();
    EndPhaseIfComplete(barrier);
}

}  // namespace simt

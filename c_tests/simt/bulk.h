// Bulk copies between shared and global memory, and the barriers in shared memory (mbarrier) that
// count arrivals and their bytes.
//
// A copy reads and writes at a random time between its start and the moment when somebody has waited for it, so that a
// missing wait shows as stale or overwritten data, whichever side of the copy it is missing on. What a copy has written
// to global memory is then like a store of the thread that waited: others see it for sure only after a release.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "support.h"
#include "stores.h"

namespace simt {

class Bulk {
   public:
    Bulk(Random& random, Stores& stores) : random_(random), stores_(stores) {}

    void InitBarrier(const uint64_t* barrier, uint32_t arrivals);
    // Announces `bytes` that the barrier's current phase has to wait for, and arrives.
    void ArriveExpecting(const uint64_t* barrier, uint32_t bytes);
    // Whether the phase of this parity has ended. Whoever polls lets some copies arrive.
    bool HasEnded(const uint64_t* barrier, uint32_t parity);

    void Load(void* shared_to, const void* from, uint32_t bytes, const uint64_t* barrier);
    void Store(uint32_t thread, void* to, const void* shared_from, uint32_t bytes);
    // Makes one group of the thread's stores since the last commit.
    void CommitStores(uint32_t thread);
    // Until at most `groups` of the thread's groups are under way: have not read their source, or have not written.
    void WaitUntilRead(uint32_t thread, uint32_t groups);
    void WaitUntilWritten(uint32_t thread, uint32_t groups);

    // A thread's own loads of 16 bytes (cp.async), in groups of their own.
    void LoadForThread(uint32_t thread, void* shared_to, const void* from);
    void CommitLoads(uint32_t thread);
    void WaitUntilLoaded(uint32_t thread, uint32_t groups);

    // The kernel ends: everything must have been waited for, but for the writing of stores.
    void Finish();

   private:
    struct Copy {
        uint8_t* to;
        const uint8_t* from;
        uint32_t bytes;
        bool has_read = false;
        std::vector<uint8_t> data = {};  // once it has read
    };
    using Group = std::vector<Copy>;
    struct Barrier {
        uint32_t arrivals;
        uint32_t pending;
        int64_t bytes;
        uint32_t phase;
        std::vector<Copy> loads;
    };
    struct Thread {
        Group open;
        std::deque<Group> committed;
        Group open_loads;
        std::deque<Group> loads;
    };

    Barrier& Find(const uint64_t* barrier);
    static void Read(Copy& copy);
    static void EndPhaseIfComplete(Barrier& barrier);
    void LandLoad(Barrier& barrier, std::size_t index);

    Random& random_;
    Stores& stores_;
    std::unordered_map<const uint64_t*, Barrier> barriers_;
    std::unordered_map<uint32_t, Thread> threads_;
};

}  // namespace simt

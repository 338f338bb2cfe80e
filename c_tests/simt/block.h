// One block of a grid, on one OS thread: its threads are fibers that run in random order and take turns only where
// threads of a GPU may notice each other: at barriers, warp operations, atomic operations and in polling loops.
//
// What a kernel must not do is refused (failure.h): a barrier or warp operation that not everyone
// joins, lanes that meet in different operations, a wait that nobody can end.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bulk.h"
#include "fiber.h"
#include "support.h"
#include "stores.h"

namespace simt {

struct Dim3 {
    uint32_t x, y, z;
};

constexpr uint32_t kLanes = 32;
constexpr uint32_t kAllLanes = ~0u;

// What a grid is launched with.
struct Grid {
    uint32_t blocks;
    uint32_t threads;
    uint32_t shared_bytes;
    bool early;
    uint64_t seed;
    std::chrono::steady_clock::time_point deadline;
};

// What the lanes of a warp gave.
struct WarpValues {
    uint64_t of[kLanes];
    uint32_t not_zero;  // a bit for each lane that gave another value than 0
};

class Block {
   public:
    Block(const Grid& grid, uint32_t index, uint8_t* dynamic_shared, Fibers& fibers);
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    // Runs `kernel` once per thread.
    void Run(const std::function<void()>& kernel);

    // The block of this OS thread.
    static Block& Current() { return *current_block_; }
    static bool IsRunning() { return current_block_ != nullptr; }

    Dim3 ThreadIdx() const { return {thread_, 0, 0}; }
    Dim3 BlockIdx() const { return {index_, 0, 0}; }
    Dim3 BlockDim() const { return {grid_.threads, 1, 1}; }
    Dim3 GridDim() const { return {grid_.blocks, 1, 1}; }
    uint8_t* dynamic_shared() const { return dynamic_shared_; }

    // The lanes of `mask`, which call it together, each give a value; the result is all of them.
    const WarpValues& MeetWarp(const char* operation, uint32_t mask, uint64_t value);
    // The whole block votes; the result is how many voted for it.
    uint32_t MeetBlock(const char* operation, bool vote);

    // A turn of a polling loop: others run.
    void Poll();
    // Now and then lets others run, where they might notice what was just done.
    void MayYield();
    // Now and then stops the whole block for a while, so that others see what it has just
    // announced before it does anything else.
    void MayLinger();

    // This thread has waited for the kernel before; where the launch is early, it must before it uses memory or ends.
    void Follow() { threads_[thread_].has_followed = true; }
    void MustHaveFollowed() const;

    uint32_t thread() const { return thread_; }
    Stores& stores() { return stores_; }
    Bulk& bulk() { return bulk_; }
    // What a report says about where it is.
    std::string Where() const;

   private:
    // Where threads wait for each other.
    struct Meeting {
        const char* operation = nullptr;
        uint32_t arrived = 0;
        uint32_t round = 0;
        std::vector<uint32_t> waiting;
    };
    // What was given there is kept twice, so that a fast lane's next value does not replace one that a slow lane has
    // yet to read.
    struct MeetingOfWarp : Meeting {
        WarpValues values[2] = {};
    };
    struct MeetingOfBlock : Meeting {
        uint32_t votes[2] = {};
    };
    struct Warp {
        uint32_t live = kAllLanes;  // those that have not ended
        MeetingOfWarp of_all;
        std::map<uint32_t, MeetingOfWarp> of_some;  // by mask
    };
    struct Thread {
        const Meeting* waits_at = nullptr;
        bool has_ended = false;
        bool has_followed = false;
    };

    static void ThreadMain();
    void EndThread();
    void EndPollingRound();
    uint32_t PickReady();
    // Goes on with a thread that is ready, which the current one may be.
    void SwitchOut();
    void TakeTurns();
    // The first to arrive begins a round.
    static void Arrive(Meeting& meeting, const char* operation);
    // Adds the caller to those that wait, or ends the round and wakes them.
    void EndRoundOrWait(Meeting& meeting, uint32_t expected);
    void EndRound(Meeting& meeting);
    void EndRoundIfAllLiveWait(const Warp& warp, uint32_t mask, Meeting& meeting);
    std::string WhereThreadsAre() const;

    static __thread Block* current_block_ __attribute__((tls_model("initial-exec")));

    const Grid& grid_;
    const uint32_t index_;
    uint8_t* const dynamic_shared_;
    Fibers& fibers_;
    Random random_;
    Stores stores_;
    Bulk bulk_;
    const bool runs_ahead_;
    const std::function<void()>* kernel_ = nullptr;
    std::vector<Thread> threads_;
    std::vector<uint32_t> ready_;
    std::vector<Warp> warps_;
    MeetingOfBlock whole_;
    uint32_t thread_ = 0;
    uint32_t alive_ = 0;
    uint32_t polls_ = 0;  // since the block slept last
    uint32_t sleep_ = 0;  // microseconds
    uint64_t done_ = 0;   // by then
};

}  // namespace simt

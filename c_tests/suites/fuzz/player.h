// One player of the fuzzer: a thread of a rank with its own communicator, streams, memory and objects, alive and dead.
// It makes random calls one after the other. Everything is drawn from seeds that all ranks share, so all make the same
// calls; in the mode `differ` a rank draws some calls on its own.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "suites/fuzz/lists.h"
#include "suites/fuzz/memory.h"
#include "suites/fuzz/referee.h"

namespace test_fuzz {

using ep::Dice;

struct Options {
    unsigned calls = 2000;  // of each rank and player, about
    unsigned seed = 1;
    unsigned seconds = 0;  // stop after this time; 0 for no limit
    unsigned threads = 1;
    unsigned own_percent = 30;  // in `differ`: share of calls that a rank draws alone, at most
    unsigned only = 0;          // this round, 1 and more; 0 for all
    unsigned creation = 1;      // not 0: collective objects are created and destroyed within a round, too
    unsigned verbose = 0;
    bool agree = true;
};

// Rank, communicator and number of a player.
struct Seat {
    int rank, size;
    unsigned number;
    ncclComm_t comm;
    bool has_ht;
};

struct Group {
    ncclEpGroup_t number = nullptr;  // NULL: none here
    bool low_latency = true;
    unsigned local_experts = 1;
    unsigned max_tokens = 1;  // may be NCCL_EP_AUTO
    unsigned row_bytes = 16;
};

struct Handle {
    ncclEpHandle_t number = nullptr;  // NULL: none here
    Group group;                      // a copy made at the creation
    unsigned tokens = 0;
    unsigned top_k = 0;
    bool any_empty = false;  // some ranks, not all, may have no tokens
    bool even = false;       // all ranks have the same number
    bool staged = false;
};

struct Tensor {
    ncclNDTensor_t descriptor{};
    ncclEpGroup_t group = nullptr;
    bool alive = false;
};

// The random numbers of one call: its kind, its objects and its arguments. In `differ` a rank may
// draw its own arguments even for a call that all ranks make.
struct Draw {
    Dice what, how;
    bool alone;     // other ranks may make another call
    bool together;  // a collective call: every rank must make it
    bool valid;     // without anything wrong
};

class Player {
   public:
    Player(const Options& options, const Seat& seat);
    ~Player();
    Player(const Player&) = delete;
    Player& operator=(const Player&) = delete;

    // A round: groups at the start, random calls, and the end of everything left. Tensors go last:
    // freeing them waits for everything, so a lost communicator must be gone by then.
    void Open(unsigned round);
    void Play(unsigned calls);
    void Close();
    void DestroyTensors();
    // After a round: a new group works.
    void ExpectRoundTrip();

    void set_comm(ncclComm_t comm) { seat_.comm = comm; }
    Referee& referee() { return referee_; }

   private:
    // rounds.cpp, as are the functions above
    void Step();
    void Collective(Draw& draw);
    void Local(Draw& draw);
    // groups.cpp
    void CreateGroup(Draw& draw);
    void DestroyGroup(Draw& draw);
    void DestroyGroupAt(size_t index, cudaStream_t stream);
    // A living group of any mode or of this one; -1 if there is none.
    int LivingGroup(Dice& dice, bool low_latency, bool any_mode) const;
    ncclEpGroup_t AnyGroup(Dice& dice) const;
    void DestroyBadGroup(Draw& draw);
    void AskGroup(Draw& draw);
    void ChooseForGroup(Draw& draw);
    void CheckHealth();
    // Checks a result pointer: it is written on success only. True if there is a result.
    bool KeptOrWritten(ncclResult_t result, bool kept, bool has_place);
    // tensors.cpp
    void CreateTensor(Draw& draw);
    void DestroyTensor(Draw& draw);
    void DestroyTensorAt(size_t index, ncclEpGroup_t group);
    // handles.cpp
    void CreateHandle(Draw& draw, bool high_throughput);
    void DestroyHandle(Draw& draw);
    void DestroyHandleAt(size_t index);
    void DrawTokens(Dice& dice, Handle* handle) const;
    void UpdateIds(Draw& draw);
    void DrawIds(unsigned slot, const Group& group, Dice& dice);
    void AskHandle(Draw& draw);
    void AskVersion(Draw& draw);
    // A living handle, or -1 and an invalid number; then `facts` are those of any handle.
    int AnyHandle(Dice& dice, Handle* facts) const;
    // operations.cpp
    void Operate(Draw& draw);
    void Complete(Draw& draw);
    struct Way {
        unsigned send_only;
        const unsigned* config;  // all configurations of operations are one number, or NULL
        cudaStream_t stream;
    };
    ncclResult_t Launch(ncclEpHandle_t handle, bool dispatch, const Lists& lists, Way way,
                        const std::string& detail = "");
    void AddLlLists(Dice& dice, const Handle& handle, const Row& row, bool dispatch, Lists* lists) const;
    void AddHtLists(Dice& dice, const Handle& handle, const Row& row, bool dispatch, Lists* lists) const;
    void AddScales(Dice& dice, const Handle& handle, const Row& row, unsigned experts, unsigned rows,
                   Lists* lists) const;
    void UseTensorOfLibrary(Dice& dice, bool even, Lists* lists) const;
    std::string DrawLists(Draw& draw, const Handle& handle, bool dispatch, Lists* lists) const;

    // player.cpp
    cudaStream_t AnyStream(Dice& dice) const;
    // Makes `stream` wait for the work of other groups: two that run at once could each hold a part
    // of the GPU on different ranks and wait for each other.
    void Order(const void* group, cudaStream_t stream);
    void Ordered(cudaStream_t stream);
    void Rest();  // waits for all streams
    // A number that names no living object: dead, of another kind, foreign or NULL.
    void* BadNumber(Dice& dice, bool as_group) const;
    static void Bury(std::vector<void*>* dead, void* number);

    static constexpr unsigned kStreams = 3;
    static constexpr unsigned kGroups = 3;
    static constexpr unsigned kTensors = 6;
    Options options_;
    Seat seat_;
    Referee referee_;
    Memory memory_;
    Dice shared_, own_;
    unsigned own_percent_ = 0;  // in this round
    cudaStream_t streams_[kStreams]{};
    cudaEvent_t last_{};
    const void* last_group_ = nullptr;
    std::array<Group, kGroups> groups_;
    std::array<Handle, kMostHandles> handles_;
    std::array<Tensor, kTensors> tensors_;
    std::vector<void*> dead_groups_, dead_handles_;
};

// Memory functions for tensors, which fail on request. allocators.cpp
struct Allocators {
    ncclEpAllocFn_t alloc_fn;
    ncclEpFreeFn_t free_fn;
};
Allocators AnyAllocators(Dice& dice, bool threads);
enum class Fails { kNot, kWithError, kWithNull };
void NextAllocation(Fails fails);  // in this thread

}  // namespace test_fuzz

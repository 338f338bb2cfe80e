// One player of the fuzzer: a thread of a rank with its own communicator, streams, memory and
// objects, alive and dead. It makes one random call after the other. Everything is drawn from seeds
// that all ranks share, so that all make the same calls; in the mode `differ` a rank draws some of
// them on its own.
#ifndef C_TESTS_SUITES_FUZZ_PLAYER_H_
#define C_TESTS_SUITES_FUZZ_PLAYER_H_

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
    unsigned seconds = 0;  // stop after so many; 0 for no limit
    unsigned threads = 1;
    unsigned own_percent = 30;  // in `differ`: calls that a rank draws alone, at most
    unsigned only = 0;          // this round, 1 and more; 0 for all
    bool agree = true;
    bool creation = true;  // objects of all ranks are created and destroyed in the middle, too
    bool verbose = false;
};

// Where a player lives.
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
    unsigned max_tokens = 1;  // NCCL_EP_AUTO in some
    unsigned row_bytes = 16;
};

struct Handle {
    ncclEpHandle_t number = nullptr;  // NULL: none here
    Group group;                      // as it was
    unsigned tokens = 0;
    unsigned top_k = 0;
    bool any_empty = false;  // some ranks, not all, may have no tokens
    bool even = false;       // all have equally many
    bool staged = false;
};

struct Tensor {
    ncclNDTensor_t descriptor{};
    ncclEpGroup_t group = nullptr;
    bool alive = false;
};

// The random numbers of one call: what is done with which objects, and the arguments. In `differ`
// the arguments can be a rank's own where the call is all ranks'.
struct Draw {
    Dice what, how;
    bool alone;     // other ranks may do something else
    bool together;  // a call of all ranks, in which each has to take part
    bool valid;     // with nothing wrong
};

class Player {
   public:
    Player(const Options& options, const Seat& seat);
    ~Player();
    Player(const Player&) = delete;
    Player& operator=(const Player&) = delete;

    // A round: groups at the start, random calls, and the end of all that is left. Tensors go last:
    // for them everything is waited for, so a lost communicator has to be gone.
    void Open(unsigned round);
    void Play(unsigned calls);
    void Close();
    void DestroyTensors();
    // After all that: a new group works.
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
    // A living group of either or of one mode; -1 if there is none.
    int LivingGroup(Dice& dice, bool low_latency, bool any_mode) const;
    ncclEpGroup_t AnyGroup(Dice& dice) const;
    void DestroyBadGroup(Draw& draw);
    void AskGroup(Draw& draw);
    void CheckHealth();
    // Judges a place for a result: written on success only. True if there is a result.
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
    // A living handle, or -1 and a bad number; `facts` are then those of some handle.
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
    void AddLlLists(Dice& dice, const Handle& handle, bool dispatch, Lists* lists) const;
    void AddHtLists(Dice& dice, const Handle& handle, bool dispatch, Lists* lists) const;
    void UseTensorOfLibrary(Dice& dice, bool even, Lists* lists) const;
    std::string DrawLists(Draw& draw, const Handle& handle, bool dispatch, Lists* lists) const;

    // player.cpp
    cudaStream_t AnyStream(Dice& dice) const;
    // Lets `stream` wait for the work of other groups: two that run at once could each hold a part
    // of the GPU on different ranks, and wait for each other.
    void Order(const void* group, cudaStream_t stream);
    void Ordered(cudaStream_t stream);
    void Rest();  // all streams
    // One that names no living object: dead, of another kind, foreign or NULL.
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

// Functions for the memory of tensors, which fail if told to. allocators.cpp
struct Allocators {
    ncclEpAllocFn_t alloc_fn;
    ncclEpFreeFn_t free_fn;
};
Allocators AnyAllocators(Dice& dice, bool threads);
enum class Fails { kNot, kWithError, kWithNull };
void NextAllocation(Fails fails);  // of this thread

}  // namespace test_fuzz

#endif  // C_TESTS_SUITES_FUZZ_PLAYER_H_

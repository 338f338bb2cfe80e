// Ranks without MPI, which ends all processes when one dies: forked processes that meet in shared
// memory, and a parent that never touches CUDA and sees how each of them ended.
#ifndef C_TESTS_FORKED_RANKS_H_
#define C_TESTS_FORKED_RANKS_H_

#include <stdatomic.h>
#include <sys/types.h>

#include "harness/harness.h"

enum { kMaxRanks = 16 };

// The places of a case where ranks wait for each other.
typedef enum {
    kFirstId,   // the id of the first communicator is there
    kSecondId,  // that of the survivors
    kReady,     // all have a group that works
    kLost,      // the victim will not take part any more
    kNoticed,   // the survivors know
    kAllKnow,   // so does a victim that came back
    kNumBarriers
} Barrier;

// What the processes of one case share.
typedef struct {
    ncclUniqueId ids[2];  // of the first communicator, and of the survivors' one
    atomic_int arrived[kNumBarriers];
    _Atomic double lost;     // when the victim died
    atomic_int named;        // survivors whose text names the victim
    atomic_bool over;        // what disturbs the victim has happened
    atomic_uint last_round;  // of a case in rounds, for all ranks; 0 until it is known
    atomic_int victim_process;
    uint64_t passed[kMaxRanks];
    uint64_t failed[kMaxRanks];
} SharedState;

// One process of a case.
typedef struct {
    EpEnv env;
    SharedState* shared;
    int victim;
    unsigned timeout_ms, slack_ms;
    uint64_t passed_before, failed_before;  // of the parent, at the fork
} DeathRank;

typedef struct {
    const char* name;
    void (*run)(DeathRank* self);
    bool victim_dies;  // by SIGKILL; otherwise it ends as the others do
    // What the parent does to the victim from outside, if anything. One that is stopped for good it
    // kills when the others have ended.
    void (*disturb)(SharedState* shared, int num_ranks, pid_t victim);
    // What a rank does before its first call of CUDA and NCCL, if anything.
    void (*prepare)(DeathRank* self);
} DeathCase;

// How a case is run.
typedef struct {
    int num_ranks;
    int victim;
    unsigned timeout_ms;
    unsigned slack_ms;  // how much later than that something may be noticed
} DeathSetting;

// Runs a case on new processes; counts its checks and how the processes ended.
void run_death_case(const DeathCase* test, DeathSetting setting);

// NCCL_EP_TIMEOUT_MS, which is set to `otherwise` if it was not set.
unsigned timeout_from_environment(unsigned otherwise);

bool is_victim(const DeathRank* self);
double seconds_now(void);

// Waits until `count` ranks have come; nobody waits for a rank that is dead. Once for each barrier.
void meet(DeathRank* self, Barrier barrier, int count);

// Opens a communicator of `size` ranks, of which this is number `rank`; `barrier` is kFirstId or
// kSecondId.
ncclComm_t open_comm(DeathRank* self, Barrier barrier, int rank, int size);

// Ends this process as the kernel would: without any clean-up.
void die(DeathRank* self);

#endif  // C_TESTS_FORKED_RANKS_H_

// Ranks without mpirun, which ends all processes when one dies: forked processes that synchronise
// through shared memory. The parent never touches CUDA and checks how each process ended.
#pragma once

#include <stdatomic.h>
#include <sys/types.h>

#include "harness/harness.h"

enum { kMaxRanks = 16 };

// Points of a case where ranks wait for each other.
typedef enum {
    kFirstId,   // the id of the first communicator is set
    kSecondId,  // the id of the survivors' communicator is set
    kReady,     // all ranks have a working group
    kNoticed,   // the survivors know of the loss
    kAllKnow,   // so does a victim that resumed
    kNumBarriers
} Barrier;

// Memory shared by the processes of one case.
typedef struct {
    ncclUniqueId ids[2];  // of the first communicator and of the survivors'
    atomic_int arrived[kNumBarriers];
    _Atomic double lost;     // when the victim died
    atomic_int named;        // survivors whose text names the victim
    atomic_int located;      // survivors whose text says how the network failed, and where
    atomic_bool over;        // the disturbance of the victim has happened
    atomic_uint last_round;  // last round of a case in rounds, for all ranks; 0 until known
    atomic_int victim_process;
    uint64_t passed[kMaxRanks];
    uint64_t failed[kMaxRanks];
} SharedState;

// One process of a case.
typedef struct {
    EpEnv env;
    SharedState* shared;
    int victim;
    const char* split;  // as in DeathSetting
    unsigned timeout_ms, slack_ms;
    uint64_t passed_before, failed_before;  // the parent's counts at the fork
} DeathRank;

// How the victim ends: like the others, or by SIGKILL, which the parent sends to a victim that
// stays stopped once the others have ended.
typedef enum { kVictimLives, kVictimDies, kVictimStops } VictimEnd;

// What the parent does to the victim from outside.
typedef void (*Disturb)(SharedState* shared, int num_ranks, pid_t victim);

typedef struct DeathCase {
    const char* name;
    void (*run)(DeathRank* self);
    VictimEnd end;
    Disturb disturb;  // or NULL
    struct DeathCase* next;
} DeathCase;

// A case of this program: stands in place of the head of its function, which gets `self`.
#define DEATH_CASE(name, end) DISTURBED_CASE(name, end, NULL)
#define DISTURBED_CASE(name, end, disturb)                            \
    static void name(DeathRank* self);                                \
    __attribute__((constructor)) static void name##_is_a_case(void) { \
        static DeathCase added = {#name, name, end, disturb, NULL};   \
        add_death_case(&added);                                       \
    }                                                                 \
    static void name(DeathRank* self)
void add_death_case(DeathCase* added);
// The first of this program; file by file, in the order in which they stand there.
const DeathCase* death_cases(void);

// How to run a case.
typedef struct {
    int num_ranks;
    int victim;
    unsigned timeout_ms;
    unsigned slack_ms;  // how much later than the deadline a loss may be noticed
    const char* split;  // a character per rank that names its node; "" for one node
} DeathSetting;

// Runs a case on new processes; counts its checks and how the processes ended.
void run_death_case(const DeathCase* test, DeathSetting setting);

// Prints how a case went, by the failed checks before it.
void print_outcome(const char* name, uint64_t failed_before);
// Prints the counts of all cases; returns the exit status.
int end_program(void);

// NCCL_EP_TIMEOUT_MS; sets it to `otherwise` if it is unset, times EP_TEST_PATIENCE if that is set.
unsigned timeout_from_environment(unsigned otherwise);

bool is_victim(const DeathRank* self);

// Waits until `count` ranks have arrived; does not wait for dead ranks. Each barrier works once.
void meet(DeathRank* self, Barrier barrier, int count);

// Opens a communicator of `size` ranks as rank `rank`; `barrier` is kFirstId or kSecondId.
ncclComm_t open_comm(DeathRank* self, Barrier barrier, int rank, int size);

// Ends this process without any clean-up, as the operating system would; or stops it: `by` is SIGKILL or SIGSTOP.
void be_lost(DeathRank* self, int by);
void die(DeathRank* self);
// Waits until the victim is lost.
void wait_for_loss(const DeathRank* self);
// All ranks meet. Then the victim dies, and the others go on once it has.
void lose_victim(DeathRank* self);
// The same by a signal: SIGKILL, or SIGSTOP in a case with kVictimStops.
void lose_victim_by(DeathRank* self, int by);

// Cases that test_ll and test_ht share.
#pragma once

#include "reference/run.h"

// Operations of several handles, no two of which have the same data.
void interleaved_handles(EpEnv* env, bool ht);
void interleaved_groups(EpEnv* env, bool ht);
void unordered_streams(EpEnv* env, bool ht);
enum { kMostRuns = 6 };
void without_a_pause(EpEnv* env, bool ht, unsigned num_runs, unsigned operations);

// Invariant sums: the bits of a combined token do not depend on the rank that is its home, nor on that rank's node.
void bits_from_any_home(EpEnv* env, bool ht);

// Dispatches, or combines, of a run with a group of its own add how long they wait for each rank, until that ends.
void waits_are_timed(RefRun* run, bool combine);

// What a selector was told last, and what it chooses.
typedef struct {
    unsigned asked;  // how often
    ncclEpQuery_t query;
    ncclEpChoice_t choice;
    bool chooses;
    ncclEpGroup_t group;
} Selector;
int select_choice(void* user, const ncclEpQuery_t* query, ncclEpChoice_t* choice);
void check_query(const Selector* selector, const RefRun* run, unsigned operation);

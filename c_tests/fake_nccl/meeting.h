// Shared memory in which the ranks of one communicator show each other a few bytes, round by round.
// Independent of CUDA.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    kMeetingMaxRanks = 64,
    kMeetingSlotBytes = 64 * 1024,  // what a rank shows in one round
    kMeetingNameBytes = 32,
};

typedef struct MeetingRoom MeetingRoom;

// One rank's seat. All ranks make the same sequence of rounds.
typedef struct {
    MeetingRoom* room;
    int rank;
    int num_ranks;
    uint64_t round;
    atomic_bool left;  // set by another thread to end a wait
} Meeting;

// A name that no other meeting has; false if the system has no random numbers.
bool meeting_new_name(char name[kMeetingNameBytes]);

// Takes a seat and waits until all are taken, at most `seconds`. Any rank may come first. Fails if
// somebody never comes, if the ranks disagree about their number, or without shared memory.
bool meeting_join(Meeting* meeting, const char* name, int num_ranks, int rank, unsigned seconds);

// Shows `mine` to all and copies what all show, in rank order, each at `stride` bytes from the one
// before. Waits for all ranks; false if the seat was left.
bool meeting_exchange(Meeting* meeting, const void* mine, size_t bytes, void* all, size_t stride);

void meeting_close(Meeting* meeting);

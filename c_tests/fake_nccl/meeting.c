// Shared memory as a place to meet; see meeting.h. A room that is all zero is valid and empty, so
// whoever comes first makes it, and the last to come removes its name: nothing stays behind.
#define _GNU_SOURCE  // shm_open, getrandom, clock_gettime
#include "meeting.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { kFirstPauseNs = 2000, kLongestPauseNs = 200000 };

struct MeetingRoom {
    atomic_int num_ranks;
    atomic_int joined;
    atomic_uint_fast64_t shown[kMeetingMaxRanks];  // rounds in which a rank has shown its bytes
    atomic_uint_fast64_t taken[kMeetingMaxRanks];  // rounds in which a rank has read all others'
    unsigned char slots[kMeetingMaxRanks][kMeetingSlotBytes];
};

bool meeting_new_name(char name[kMeetingNameBytes]) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof(number), 0) != (ssize_t)sizeof(number)) return false;
    snprintf(name, kMeetingNameBytes, "/ncclep-%016llx", (unsigned long long)number);
    return true;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// There may be more ranks than cores: a wait yields the core, longer and longer.
static void pause_a_while(long* nanoseconds) {
    const struct timespec time = {0, *nanoseconds};
    nanosleep(&time, NULL);
    if (*nanoseconds < kLongestPauseNs) *nanoseconds *= 2;
}

static MeetingRoom* open_room(const char* name) {
    const int file = shm_open(name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0) return NULL;
    void* room = MAP_FAILED;
    if (ftruncate(file, sizeof(MeetingRoom)) == 0) {
        room = mmap(NULL, sizeof(MeetingRoom), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    return room == MAP_FAILED ? NULL : room;
}

bool meeting_join(Meeting* meeting, const char* name, int num_ranks, int rank, unsigned seconds) {
    memset(meeting, 0, sizeof(*meeting));
    if (num_ranks < 1 || num_ranks > kMeetingMaxRanks || rank < 0 || rank >= num_ranks) return false;
    MeetingRoom* room = open_room(name);
    if (room == NULL) return false;
    meeting->room = room;
    meeting->rank = rank;
    meeting->num_ranks = num_ranks;
    int nobody = 0;
    const bool agree = atomic_compare_exchange_strong(&room->num_ranks, &nobody, num_ranks) || nobody == num_ranks;
    const bool last = agree && atomic_fetch_add(&room->joined, 1) + 1 == num_ranks;
    const double deadline = seconds_now() + seconds;
    long pause = kFirstPauseNs;
    while (agree && atomic_load(&room->joined) < num_ranks && seconds_now() < deadline) pause_a_while(&pause);
    const bool complete = agree && atomic_load(&room->joined) == num_ranks;
    if (last || !complete) shm_unlink(name);
    if (!complete) meeting_close(meeting);
    return complete;
}

static bool wait_for_all(Meeting* meeting, atomic_uint_fast64_t* rounds, uint64_t round) {
    long pause = kFirstPauseNs;
    for (int i = 0; i < meeting->num_ranks;) {
        if (atomic_load(&rounds[i]) >= round) {
            ++i;
            continue;
        }
        if (atomic_load(&meeting->left)) return false;
        pause_a_while(&pause);
    }
    return true;
}

bool meeting_exchange(Meeting* meeting, const void* mine, size_t bytes, void* all, size_t stride) {
    MeetingRoom* room = meeting->room;
    if (bytes > kMeetingSlotBytes) return false;
    // The slot is free once everybody has read what the last round put there.
    if (!wait_for_all(meeting, room->taken, meeting->round)) return false;
    ++meeting->round;
    memcpy(room->slots[meeting->rank], mine, bytes);
    atomic_store(&room->shown[meeting->rank], meeting->round);
    if (!wait_for_all(meeting, room->shown, meeting->round)) return false;
    for (int i = 0; i < meeting->num_ranks; ++i) {
        memcpy((unsigned char*)all + (size_t)i * stride, room->slots[i], bytes);
    }
    atomic_store(&room->taken[meeting->rank], meeting->round);
    return true;
}

void meeting_close(Meeting* meeting) {
    if (meeting->room != NULL) munmap(meeting->room, sizeof(MeetingRoom));
    meeting->room = NULL;
}

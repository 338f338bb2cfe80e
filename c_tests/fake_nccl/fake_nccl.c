// The test-only NCCL; README.md says what is different. A communicator is a room in shared memory in which the ranks
// show each other a few bytes, round by round; its all-gather is a copy to pinned memory, a host function that meets
// the others there, and copies back, all of it in the order of the caller's stream.
#define _GNU_SOURCE  // shm_open, getrandom, nanosleep
#include <cuda_runtime.h>
#include <fcntl.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

// Everything else in this library stays hidden.
#define EXPORT __attribute__((visibility("default")))

enum {
    kMaxRanks = 64,
    kSlotBytes = 64 * 1024,  // what a rank shows in one round
    kJoinSeconds = 60,
    kFirstPauseNs = 2000,
    kLongestPauseNs = 200000,
};

// A room that is all zero is valid and empty, so whoever comes first makes it, and the last to come removes its name:
// nothing stays behind.
typedef struct {
    atomic_int num_ranks;
    atomic_int joined;
    atomic_uint_fast64_t shown[kMaxRanks];  // rounds in which a rank has shown its bytes
    atomic_uint_fast64_t taken[kMaxRanks];  // rounds in which a rank has read all others'
    unsigned char slots[kMaxRanks][kSlotBytes];
} Room;

// NCCL orders the operations of a communicator whatever their streams, and so does `last`.
struct ncclComm {
    Room* room;
    int rank, num_ranks;
    uint64_t round;    // all ranks make the same sequence of rounds
    atomic_bool left;  // set by another thread to end a wait
    int device;
    cudaEvent_t last;       // the end of the operation before
    unsigned char* staged;  // pinned: this rank's bytes, then those of all ranks
    atomic_bool failed;     // an operation ended without its result
    atomic_int waiting;     // operations that the stream has not got through
};

// ---- The room ----------------------------------------------------------------------------------

// There may be more ranks than cores: a wait yields the core, longer and longer.
static void pause_a_while(long* nanoseconds) {
    const struct timespec time = {0, *nanoseconds};
    nanosleep(&time, NULL);
    if (*nanoseconds < kLongestPauseNs) *nanoseconds *= 2;
}

static Room* open_room(const char* name) {
    const int file = shm_open(name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0) return NULL;
    void* room = MAP_FAILED;
    if (ftruncate(file, sizeof(Room)) == 0) {
        room = mmap(NULL, sizeof(Room), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    return room == MAP_FAILED ? NULL : room;
}

// Waits until all ranks are there. Any may come first. Fails if somebody never comes, if the ranks disagree about their
// number, or without shared memory.
static bool join(ncclComm_t comm, const char* name) {
    Room* room = open_room(name);
    if (room == NULL) return false;
    comm->room = room;
    int nobody = 0;
    const bool agree = atomic_compare_exchange_strong(&room->num_ranks, &nobody, comm->num_ranks) ||
                       nobody == comm->num_ranks;
    const bool last = agree && atomic_fetch_add(&room->joined, 1) + 1 == comm->num_ranks;
    const time_t deadline = time(NULL) + kJoinSeconds;
    long pause = kFirstPauseNs;
    while (agree && atomic_load(&room->joined) < comm->num_ranks && time(NULL) < deadline) pause_a_while(&pause);
    const bool complete = agree && atomic_load(&room->joined) == comm->num_ranks;
    if (last || !complete) shm_unlink(name);
    return complete;
}

static bool wait_for_all(ncclComm_t comm, atomic_uint_fast64_t* rounds) {
    long pause = kFirstPauseNs;
    for (int i = 0; i < comm->num_ranks;) {
        if (atomic_load(&rounds[i]) >= comm->round) {
            ++i;
            continue;
        }
        if (atomic_load(&comm->left)) return false;
        pause_a_while(&pause);
    }
    return true;
}

// Shows `mine` to all and copies what all show, in rank order, each at `stride` bytes from the one before. False if
// this rank has left.
static bool exchange(ncclComm_t comm, const void* mine, size_t bytes, void* all, size_t stride) {
    Room* room = comm->room;
    // The slot is free once everybody has read what the last round put there.
    if (!wait_for_all(comm, room->taken)) return false;
    ++comm->round;
    memcpy(room->slots[comm->rank], mine, bytes);
    atomic_store(&room->shown[comm->rank], comm->round);
    if (!wait_for_all(comm, room->shown)) return false;
    for (int i = 0; i < comm->num_ranks; ++i) memcpy((char*)all + (size_t)i * stride, room->slots[i], bytes);
    atomic_store(&room->taken[comm->rank], comm->round);
    return true;
}

// ---- Communicators -----------------------------------------------------------------------------

// By this name programs know that communicators of one process take turns (README.md).
EXPORT int ncclEpFakeNccl(void);
int ncclEpFakeNccl(void) { return 1; }

EXPORT ncclResult_t ncclGetVersion(int* version) {
    if (version == NULL) return ncclInvalidArgument;
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

// The name of a room that no other has.
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    uint64_t number = 0;
    if (id == NULL) return ncclInvalidArgument;
    if (getrandom(&number, sizeof(number), 0) != (ssize_t)sizeof(number)) return ncclSystemError;
    memset(id, 0, sizeof(*id));
    snprintf(id->internal, sizeof(id->internal), "/ncclep-%016llx", (unsigned long long)number);
    return ncclSuccess;
}

static void free_comm(ncclComm_t comm) {
    if (comm->staged != NULL) cudaFreeHost(comm->staged);
    if (comm->last != NULL) cudaEventDestroy(comm->last);
    if (comm->room != NULL) munmap(comm->room, sizeof(Room));
    free(comm);
}

static bool make_resources(ncclComm_t comm) {
    const size_t bytes = (size_t)(1 + comm->num_ranks) * kSlotBytes;
    return cudaGetDevice(&comm->device) == cudaSuccess &&
           cudaEventCreateWithFlags(&comm->last, cudaEventDisableTiming) == cudaSuccess &&
           cudaHostAlloc((void**)&comm->staged, bytes, cudaHostAllocDefault) == cudaSuccess;
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
    if (comm == NULL || nranks < 1 || nranks > kMaxRanks || rank < 0 || rank >= nranks) return ncclInvalidArgument;
    ncclComm_t created = calloc(1, sizeof(*created));
    if (created == NULL) return ncclSystemError;
    created->rank = rank;
    created->num_ranks = nranks;
    id.internal[sizeof(id.internal) - 1] = '\0';
    const bool able = make_resources(created);
    if (!join(created, id.internal) || !able) {
        fprintf(stderr, "fake NCCL: rank %d of %d: %s\n", rank, nranks,
                able ? "the ranks did not meet" : "no device, event or pinned memory");
        free_comm(created);
        return able ? ncclRemoteError : ncclUnhandledCudaError;
    }
    *comm = created;
    return ncclSuccess;
}

static ncclResult_t finish(ncclComm_t comm) {
    return cudaEventSynchronize(comm->last) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (comm == NULL) return ncclSuccess;
    const ncclResult_t result = finish(comm);
    free_comm(comm);
    return result;
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (comm == NULL) return ncclSuccess;
    atomic_store(&comm->left, true);
    // The stream may still have to get to an operation that was enqueued; it must find its memory.
    long pause = kLongestPauseNs;
    while (atomic_load(&comm->waiting) > 0) pause_a_while(&pause);
    return ncclCommDestroy(comm);
}

static ncclResult_t tell(const ncclComm_t comm, const int* value, int* answer) {
    if (comm == NULL || answer == NULL) return ncclInvalidArgument;
    *answer = *value;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return tell(comm, &comm->num_ranks, count); }
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return tell(comm, &comm->rank, rank); }
EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { return tell(comm, &comm->device, device); }

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
    if (comm == NULL || result == NULL) return ncclInvalidArgument;
    *result = atomic_load(&comm->failed) ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}

// What a rank tells the others. Of the names of one colour, that of its first rank is used.
typedef struct {
    int color;
    int key;
    ncclUniqueId id;
} SplitWish;

// Ranks of a part are ordered by key, then by their rank before.
static bool is_before(const SplitWish* wishes, int a, int b) {
    return wishes[a].key != wishes[b].key ? wishes[a].key < wishes[b].key : a < b;
}

EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
    (void)config;
    if (comm == NULL || newcomm == NULL) return ncclInvalidArgument;
    *newcomm = NULL;
    SplitWish wishes[kMaxRanks];
    SplitWish mine = {color, key, {{0}}};
    ncclResult_t result = ncclGetUniqueId(&mine.id);
    if (result == ncclSuccess) result = finish(comm);
    if (result != ncclSuccess) return result;
    if (!exchange(comm, &mine, sizeof(mine), wishes, sizeof(mine))) return ncclRemoteError;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    int first = comm->rank;
    int rank = 0;
    int count = 0;
    for (int i = 0; i < comm->num_ranks; ++i) {
        if (wishes[i].color != color) continue;
        ++count;
        if (is_before(wishes, i, comm->rank)) ++rank;
        if (is_before(wishes, i, first)) first = i;
    }
    return ncclCommInitRank(newcomm, count, wishes[first].id, rank);
}

EXPORT const char* ncclGetErrorString(ncclResult_t result) {
    static const char* const kTexts[] = {"no error",       "a CUDA call failed", "a system call failed",
                                         "internal error", "invalid argument",   "invalid usage",
                                         "remote process failed or was lost"};
    return (size_t)result < sizeof(kTexts) / sizeof(kTexts[0]) ? kTexts[result] : "unknown result code";
}

// ---- The all-gather ----------------------------------------------------------------------------

typedef struct {
    ncclComm_t comm;
    size_t bytes;
} Round;

// Runs between the copies. Without the other ranks' bytes the receive buffer gets zeros, and
// ncclCommGetAsyncError says why.
static void CUDART_CB meet(void* argument) {
    Round* round = argument;
    ncclComm_t comm = round->comm;
    unsigned char* all = comm->staged + kSlotBytes;
    if (atomic_load(&comm->failed) || !exchange(comm, comm->staged, round->bytes, all, kSlotBytes)) {
        atomic_store(&comm->failed, true);
        memset(all, 0, (size_t)comm->num_ranks * kSlotBytes);
    }
    atomic_fetch_sub(&comm->waiting, 1);
    free(round);
}

static cudaError_t launch_meeting(ncclComm_t comm, size_t bytes, cudaStream_t stream) {
    Round* round = malloc(sizeof(*round));
    if (round == NULL) return cudaErrorMemoryAllocation;
    *round = (Round){comm, bytes};
    atomic_fetch_add(&comm->waiting, 1);
    const cudaError_t result = cudaLaunchHostFunc(stream, meet, round);
    if (result == cudaSuccess) return cudaSuccess;
    atomic_fetch_sub(&comm->waiting, 1);
    free(round);
    return result;
}

// One round: `bytes` of each rank, which are `stride` bytes apart in the end.
static cudaError_t gather_part(ncclComm_t comm, const char* send, char* receive, size_t stride, size_t bytes,
                               cudaStream_t stream) {
    cudaError_t result = cudaMemcpyAsync(comm->staged, send, bytes, cudaMemcpyDeviceToHost, stream);
    if (result == cudaSuccess) result = launch_meeting(comm, bytes, stream);
    for (int i = 0; result == cudaSuccess && i < comm->num_ranks; ++i) {
        result = cudaMemcpyAsync(receive + (size_t)i * stride, comm->staged + (size_t)(1 + i) * kSlotBytes, bytes,
                                 cudaMemcpyHostToDevice, stream);
    }
    return result;
}

EXPORT ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                                  ncclComm_t comm, cudaStream_t stream) {
    static const size_t kBytesOf[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};  // up to bfloat16, by NCCL's numbers
    if (comm == NULL || (size_t)datatype >= sizeof(kBytesOf) / sizeof(kBytesOf[0])) return ncclInvalidArgument;
    const size_t stride = sendcount * kBytesOf[datatype];
    if (stride == 0) return ncclSuccess;
    if (sendbuff == NULL || recvbuff == NULL) return ncclInvalidArgument;
    cudaError_t result = cudaStreamWaitEvent(stream, comm->last, 0);
    for (size_t at = 0; result == cudaSuccess && at < stride; at += kSlotBytes) {
        const size_t bytes = stride - at < kSlotBytes ? stride - at : kSlotBytes;
        result = gather_part(comm, (const char*)sendbuff + at, (char*)recvbuff + at, stride, bytes, stream);
    }
    if (result == cudaSuccess) result = cudaEventRecord(comm->last, stream);
    return result == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// Objects of memory that a program has put together of pieces (cuMemCreate, cuMemMap), as allocators of frameworks do.
#define _GNU_SOURCE  // RTLD_DEFAULT
#include <cuda.h>
#include <dlfcn.h>

#include "suites/memory/memory.h"

enum { kPieceBytes = 2 << 20, kMostPieces = 3, kBefore = 512, kBytes = 4096 };

// The driver's functions, which no program here links.
#define FUNCTIONS(f)                                                                                    \
    f(cuMemCreate) f(cuMemRelease) f(cuMemAddressReserve) f(cuMemAddressFree) f(cuMemMap) f(cuMemUnmap) \
        f(cuMemSetAccess)
#define DECLARE(name) static __typeof__(&name) p_##name;
FUNCTIONS(DECLARE)

static bool find_functions(void) {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    bool all = true;
#define FIND(name)                                                          \
    {                                                                       \
        void* found = dlsym(driver != NULL ? driver : RTLD_DEFAULT, #name); \
        memcpy(&p_##name, &found, sizeof(found));                           \
        all = all && found != NULL;                                         \
    }
    FUNCTIONS(FIND)
    return all;
}

typedef struct {
    CUdeviceptr base;
    unsigned pieces;
} Memory;

static Memory memory_of(unsigned pieces, CUmemAllocationHandleType handles) {
    int device = 0;
    EP_REQUIRE_CUDA(cudaGetDevice(&device));
    const CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    const CUmemAllocationProp kind = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = handles, .location = here};
    const CUmemAccessDesc access = {.location = here, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const size_t all = pieces * (size_t)kPieceBytes;
    Memory memory = {0, pieces};
    EP_REQUIRE(p_cuMemAddressReserve(&memory.base, all, 0, 0, 0) == CUDA_SUCCESS);
    for (unsigned i = 0; i < pieces; ++i) {
        CUmemGenericAllocationHandle piece;
        EP_REQUIRE(p_cuMemCreate(&piece, kPieceBytes, &kind, 0) == CUDA_SUCCESS);
        const CUdeviceptr at = memory.base + i * (CUdeviceptr)kPieceBytes;
        EP_REQUIRE(p_cuMemMap(at, kPieceBytes, 0, piece, 0) == CUDA_SUCCESS);
        EP_REQUIRE(p_cuMemRelease(piece) == CUDA_SUCCESS);
    }
    EP_REQUIRE(p_cuMemSetAccess(memory.base, all, &access, 1) == CUDA_SUCCESS);
    return memory;
}

static void free_memory(Memory memory) {
    for (unsigned i = 0; i < memory.pieces; ++i) {
        const CUdeviceptr at = memory.base + i * (CUdeviceptr)kPieceBytes;
        EP_CHECK(p_cuMemUnmap(at, kPieceBytes) == CUDA_SUCCESS);
    }
    EP_CHECK(p_cuMemAddressFree(memory.base, memory.pieces * (size_t)kPieceBytes) == CUDA_SUCCESS);
}

// Rank 1 has one piece, the last of three and more memory of cudaMalloc, others several, across which the object lies.
EP_TEST(memory_in_pieces_is_seen_by_its_node) {
    if (!find_functions()) return;
    ncclEpGroup_t group = open_group(env);
    const bool is_plain = env->size > 2 && env->rank == env->size - 1;
    const unsigned pieces = env->rank == 1 ? 1 : kMostPieces;
    for (unsigned round = 0; round < 2; ++round) {
        Memory memory = {0, 0};
        uint8_t* at = NULL;
        if (is_plain) {
            at = ep_device_alloc(kBytes);
        } else {
            memory = memory_of(pieces, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
            at = (uint8_t*)(memory.base + (pieces == 1 ? 4096 : kPieceBytes - kBefore));
        }
        EP_CHECK_NCCL(ncclEpMemRegister(group, at, kBytes, NULL));
        fill(env, at, kBytes, 70 + round);
        check_peers(env, group, at, 70 + round);
        EP_CHECK_EQ_U64(info_of(group, at).offset, 0);
        EP_CHECK_EQ_I64(object_at(group, at - 1), -1);
        EP_CHECK_NCCL(ncclEpMemDeregister(group, at));
        if (is_plain) {
            ep_device_free(at);
        } else {
            free_memory(memory);
        }
    }
    close_group(env, group);
}

EP_TEST(memory_in_pieces_without_descriptors_is_refused) {
    if (!find_functions()) return;
    ncclEpGroup_t group = open_group(env);
    const bool is_last = env->rank == env->size - 1;
    const Memory memory = memory_of(1, is_last ? CU_MEM_HANDLE_TYPE_NONE : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    void* at = (void*)memory.base;
    EP_CHECK_RESULT(ncclEpMemRegister(group, at, kBytes, NULL), is_last ? ncclInvalidArgument : ncclRemoteError);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "which other processes can map");
    EP_CHECK_STR_CONTAINS(ep_last_error(), "cuMemExportToShareableHandle");
    free_memory(memory);
    close_group(env, group);
}

EP_TEST(memory_in_pieces_ends_in_them) {
    if (!find_functions()) return;
    ncclEpGroup_t group = open_group(env);
    const Memory memory = memory_of(2, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    void* at = (void*)(memory.base + kBefore);
    EP_CHECK_RESULT(ncclEpMemRegister(group, at, 2 * (size_t)kPieceBytes, NULL), ncclInvalidArgument);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "must end within the allocation that ptr is in");
    EP_CHECK_NCCL(ncclEpMemRegister(group, at, 2 * (size_t)kPieceBytes - kBefore, NULL));
    close_group(env, group);
    free_memory(memory);
}

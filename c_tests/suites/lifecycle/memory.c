// Memory: the caller's allocation functions, tensors that outlive everything else, descriptors made by hand.
#include "suites/lifecycle/lifecycle.h"

// ---- Allocation functions that record what they gave -------------------------------------------

enum { kMostPointers = 64 };

static void* g_given[kMostPointers];
static size_t g_num_given;
static int g_allocs;
static int g_frees;
static int g_foreign_frees;

static void forget_pointers(void) {
    g_num_given = 0;
    g_allocs = 0;
    g_frees = 0;
    g_foreign_frees = 0;
}

static cudaError_t remembering_alloc(void** data, size_t bytes) {
    const cudaError_t result = cudaMalloc(data, bytes);
    ++g_allocs;
    if (result == cudaSuccess && g_num_given < kMostPointers) g_given[g_num_given++] = *data;
    return result;
}

static cudaError_t remembering_free(void* data) {
    size_t at = 0;
    while (at < g_num_given && g_given[at] != data) ++at;
    ++g_frees;
    if (at < g_num_given) {
        g_given[at] = g_given[--g_num_given];
    } else {
        ++g_foreign_frees;
    }
    return cudaFree(data);
}

static Place with_callbacks(const EpEnv* env, ncclEpAllocFn_t alloc_fn, ncclEpFreeFn_t free_fn) {
    Place place = place_of(env);
    place.alloc_fn = alloc_fn;
    place.free_fn = free_fn;
    forget_pointers();
    return place;
}

// free_fn gets all memory that alloc_fn gave, and no other.
EP_TEST(both_callbacks) {
    Trip trip = open_trip(ep_algorithm_for_any_case(env), with_callbacks(env, remembering_alloc, remembering_free));
    EP_CHECK(g_allocs >= kNumTensorsOfBoth);
    EP_CHECK(make_trip(&trip));
    // Operations allocate nothing.
    const int allocs = g_allocs;
    EP_CHECK(make_trip(&trip));
    EP_CHECK_EQ_I64(g_allocs, allocs);
    EP_CHECK(close_trip(&trip));
    EP_CHECK_EQ_U64(g_num_given, 0);
    EP_CHECK_EQ_I64(g_frees, g_allocs);
    EP_CHECK_EQ_I64(g_foreign_frees, 0);
}

// Each callback has its own default: memory of alloc_fn goes to cudaFree, memory of cudaMalloc to free_fn.
EP_TEST(one_callback_alone) {
    Trip trip = open_trip(NCCL_EP_ALGO_LOW_LATENCY, with_callbacks(env, remembering_alloc, NULL));
    EP_CHECK(g_allocs > 0);
    finish_trip(&trip);
    EP_CHECK_EQ_I64(g_frees, 0);

    trip = open_trip(NCCL_EP_ALGO_LOW_LATENCY, with_callbacks(env, NULL, remembering_free));
    finish_trip(&trip);
    EP_CHECK_EQ_I64(g_allocs, 0);
    EP_CHECK(g_frees > 0);
}

// The first release's own test destroys most tensors after the group and the communicator are gone.
EP_TEST(tensors_outlive_group_and_communicator) {
    Place place = with_callbacks(env, remembering_alloc, remembering_free);
    EP_REQUIRE_NCCL(ncclCommSplit(env->comm, 0, env->rank, &place.comm, NULL));
    Trip trip = open_trip(NCCL_EP_ALGO_LOW_LATENCY, place);
    EP_CHECK(make_trip(&trip));
    EP_CHECK_NCCL(ncclEpHandleDestroy(trip.handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(trip.group, env->stream));
    EP_CHECK_NCCL(ncclCommDestroy(place.comm));
    EP_CHECK(came_back(&trip));
    // A new group does not disturb the memory of the old one.
    Trip other = open_trip(NCCL_EP_ALGO_LOW_LATENCY, place_of(env));
    EP_CHECK(destroy_tensors(&trip, trip.group));
    EP_CHECK_EQ_U64(g_num_given, 0);
    EP_CHECK_EQ_I64(g_foreign_frees, 0);
    finish_trip(&other);
}

// ---- Descriptors -------------------------------------------------------------------------------

static ncclNDTensor_t tensor_by_hand(void* data, unsigned size) {
    ncclNDTensor_t tensor;
    memset(&tensor, 0, sizeof(tensor));
    tensor.version = 0xffffffffU;  // not read
    tensor.ndim = 1;
    tensor.sizes = malloc(sizeof(unsigned));
    tensor.strides = malloc(sizeof(unsigned));
    EP_REQUIRE(tensor.sizes != NULL && tensor.strides != NULL);
    tensor.sizes[0] = size;
    tensor.strides[0] = 1;
    tensor.datatype = ncclInt8;
    tensor.data = data;
    return tensor;
}

EP_TEST(descriptors_made_by_hand) {
    Trip trip = open_trip(NCCL_EP_ALGO_LOW_LATENCY, with_callbacks(env, remembering_alloc, remembering_free));
    // With a group, its free_fn gets the data.
    void* data = ep_device_alloc(32);
    ncclNDTensor_t owned = tensor_by_hand(data, 32);
    EP_CHECK_NCCL(ncclEpTensorDestroy(trip.group, &owned));
    EP_CHECK_EQ_I64(g_frees, 1);
    EP_CHECK(owned.data == NULL && owned.sizes == NULL);
    // Without one, the data stays the caller's; the arrays are released all the same.
    data = ep_device_alloc(32);
    ncclNDTensor_t borrowed = tensor_by_hand(data, 32);
    EP_CHECK_NCCL(ncclEpTensorDestroy(NULL, &borrowed));
    EP_CHECK_EQ_I64(g_frees, 1);
    EP_CHECK(borrowed.sizes == NULL && borrowed.strides == NULL);
    ep_device_free(data);
    // Programs edit tensors that the library made: another tag, fewer rows, their own arrays.
    ncclNDTensor_t edited = ep_tensor_2d(trip.group, ncclInt8, NCCL_EP_TENSOR_TAG_TOKENS, 8, 16);
    edited.tag = NCCL_EP_TENSOR_TAG_NONE;
    edited.sizes[0] = 3;
    free(edited.strides);
    edited.strides = NULL;
    EP_CHECK_NCCL(ncclEpTensorDestroy(trip.group, &edited));
    EP_CHECK_EQ_I64(g_frees, 2);
    // A tensor without elements is a tensor, too.
    ncclNDTensor_t empty = ep_tensor_2d(trip.group, ncclInt8, NCCL_EP_TENSOR_TAG_TOKENS, 0, 16);
    EP_CHECK(empty.sizes != NULL);
    EP_CHECK_NCCL(ncclEpTensorDestroy(trip.group, &empty));
    void* memory = NULL;
    EP_CHECK_NCCL(ncclEpMemAlloc(trip.group, &memory, 64));
    finish_trip(&trip);
    // The library's memory has ended with the group, and is nobody's to free.
    const int frees_of_trip = g_frees;
    ncclNDTensor_t ended = tensor_by_hand(memory, 64);
    EP_CHECK_NCCL(ncclEpTensorDestroy(trip.group, &ended));
    EP_CHECK_EQ_I64(g_frees, frees_of_trip);
    // A destroyed group and a newer one each keep their own free_fn.
    Trip other = open_trip(NCCL_EP_ALGO_LOW_LATENCY, place_of(env));
    EP_CHECK(close_trip(&other));
    const int frees = g_frees;
    ncclNDTensor_t late = tensor_by_hand(ep_device_alloc(32), 32);
    EP_CHECK_NCCL(ncclEpTensorDestroy(other.group, &late));
    EP_CHECK_EQ_I64(g_frees, frees);
    late = tensor_by_hand(ep_device_alloc(32), 32);
    EP_CHECK_NCCL(ncclEpTensorDestroy(trip.group, &late));
    EP_CHECK_EQ_I64(g_frees, frees + 1);
}

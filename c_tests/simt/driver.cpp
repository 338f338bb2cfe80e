// A CUDA driver without a GPU: the functions of libcuda that libnccl_ep calls.
//
// Memory, streams and events are those of the CPU stand-ins (hostsim), which this library contains;
// a module is a library of kernels that g++ has compiled, and a launch runs one on its stream.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "block.h"
#include "kernel.h"
#include "launch.h"
#include "driver.h"

// Of the stand-ins: see hostsim/src/cuda/capture.rs.
extern "C" void ncclEpHostsimAllowGraphs();
extern "C" cudaError_t ncclEpHostsimCapture(cudaStream_t stream, int* status, unsigned long long* number);
extern "C" cudaError_t ncclEpHostsimRefuseCapture(cudaStream_t stream);
extern "C" uint64_t ncclEpHostsimResets();
extern "C" cudaError_t ncclEpHostsimGiveToCapture(unsigned long long number, cudaHostFn_t release, void* data);

namespace {

// Kernels can be launched again and again, unlike the host backend's functions.
__attribute__((constructor)) void AllowGraphs() { ncclEpHostsimAllowGraphs(); }

constexpr uint64_t kMultiprocessors = 2;
constexpr int kGreatestPriority = -5;
// Ten times the compute capability that the kernels are compiled for.
constexpr int kCodeVersion = 90;

using simt::Result;

struct UserObject {
    void* data;
    CUhostFn release;
};

cudaStream_t Runtime(CUstream stream) {
    simt::CheckContext();
    return reinterpret_cast<cudaStream_t>(stream);
}

cudaEvent_t Runtime(CUevent event) {
    simt::CheckContext();
    return reinterpret_cast<cudaEvent_t>(event);
}

void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

// The context of a device is its number, plus something that makes it no small integer.
constexpr uintptr_t kFirstContext = 0x5300'0000'0000;

CUcontext ContextOf(int device) { return reinterpret_cast<CUcontext>(kFirstContext + static_cast<uintptr_t>(device)); }

int DeviceOf(CUcontext context) { return static_cast<int>(reinterpret_cast<uintptr_t>(context) - kFirstContext); }

// What a block may have of dynamic shared memory without asking, and those who have asked for more.
constexpr uint32_t kSharedBytes = 48 << 10;
std::mutex mutex;
std::map<CUfunction, uint32_t> shared_bytes_allowed;

// The images that were loaded, with the numbers of the contexts.
std::set<std::pair<uint64_t, const void*>> loaded;

// The kernels that a library of kernels has; the one that has all is beside the shim.
constexpr const char* kAllKernels = "libncclep_simt_kernels.so";

simt::Kernel* KernelsIn(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void* kernels = library != nullptr ? dlsym(library, "simt_kernels") : nullptr;
    if (kernels == nullptr) simt::Fail(dlerror());
    return static_cast<simt::Kernel*>(kernels);
}

// The block of the next launch that is to begin late, or kNoBlock; and whether such blocks still wait.
constexpr uint32_t kNoBlock = UINT32_MAX;
constexpr useconds_t kHeldMicroseconds = 100;
std::atomic<uint32_t> block_to_hold{kNoBlock};
std::atomic<bool> holds{false};

// A launch. Those of graphs stay as long as the process, as a graph may be replayed at any time.
struct Work {
    const simt::Kernel* kernel;
    simt::LaunchShape shape;
    uint32_t held_block;
    std::vector<char> params;
    bool runs_once;
};

// Whether a launch may run beside the kernel before it. Here it does not, but kernels must be ready for it.
bool IsEarly(const CUlaunchConfig& config) {
    for (unsigned i = 0; i < config.numAttrs; ++i) {
        if (config.attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
            return config.attrs[i].value.programmaticStreamSerializationAllowed != 0;
        }
    }
    return false;
}

void RunKernel(void* data) {
    static const uint64_t seed = simt::Setting("NCCLEP_SIMT_SEED", 1);
    static std::atomic<uint64_t> launches{0};
    const auto* work = static_cast<Work*>(data);
    simt::Launch(work->shape, seed * 1000003 + launches.fetch_add(1), [work] {
        // The first thread of the block waits for all: they share an OS thread.
        while (holds && simt::Block::Current().BlockIdx().x == work->held_block) usleep(kHeldMicroseconds);
        work->kernel->run(work->params.data());
    });
    if (work->runs_once) delete work;
}

std::vector<int>& DevicesBelow() {
    static thread_local std::vector<int> devices;
    return devices;
}

bool HasContext() {
    static thread_local const bool is_first = gettid() == getpid();
    return is_first || !DevicesBelow().empty();
}

}  // namespace

void simt::CheckContext() {
    if (!HasContext()) Fail("the driver is called outside of any context");
}

extern "C" {

// By this name programs know that they run without a GPU.
int ncclEpSimt() { return 1; }

// That block of the kernel that is launched next begins when ncclEpSimtRelease is called, as if other work
// had its multiprocessor until then.
void ncclEpSimtHold(unsigned block) {
    holds = true;
    block_to_hold = block;
}

void ncclEpSimtRelease() {
    block_to_hold = kNoBlock;
    holds = false;
}

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuGetErrorName(CUresult error, const char** name) {
    *name = cudaGetErrorName(static_cast<cudaError_t>(error));
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = cudaGetErrorString(static_cast<cudaError_t>(error));
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice) {
    std::snprintf(name, static_cast<size_t>(bytes), "SIMT shim");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    if (attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) {
        *value = static_cast<int>(simt::Setting("NCCLEP_SIMT_MULTIPROCESSORS", kMultiprocessors));
        return CUDA_SUCCESS;
    }
    return Result(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
}

// ---- Contexts ---------------------------------------------------------------------------------
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    *context = ContextOf(device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }

CUresult cuCtxGetCurrent(CUcontext* context) {
    int device = 0;
    const CUresult result = Result(cudaGetDevice(&device));
    *context = HasContext() ? ContextOf(device) : nullptr;
    return result;
}

// A reset gives the context of a device another number.
CUresult cuCtxGetId(CUcontext context, unsigned long long* number) {
    int device = 0;
    if (context != nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = Result(cudaGetDevice(&device));
    *number = (ncclEpHostsimResets() << 32) + static_cast<uint64_t>(device) + 1;
    return result;
}

CUresult cuCtxGetDevice(CUdevice* device) { return Result(cudaGetDevice(device)); }

CUresult cuCtxPushCurrent(CUcontext context) {
    int below = 0;
    const CUresult result = Result(cudaGetDevice(&below));
    if (result != CUDA_SUCCESS) return result;
    DevicesBelow().push_back(below);
    return Result(cudaSetDevice(DeviceOf(context)));
}

CUresult cuCtxPopCurrent(CUcontext* context) {
    const CUresult result = cuCtxGetCurrent(context);
    if (result != CUDA_SUCCESS) return result;
    if (DevicesBelow().empty()) return CUDA_ERROR_INVALID_CONTEXT;
    const int below = DevicesBelow().back();
    DevicesBelow().pop_back();
    return Result(cudaSetDevice(below));
}

CUresult cuCtxSynchronize() { return Result(cudaDeviceSynchronize()); }
CUresult cuCtxEnablePeerAccess(CUcontext, unsigned) { return CUDA_SUCCESS; }

// ---- Streams and events -----------------------------------------------------------------------
CUresult cuStreamSynchronize(CUstream stream) { return Result(cudaStreamSynchronize(Runtime(stream))); }

CUresult cuStreamQuery(CUstream stream) { return Result(cudaStreamQuery(Runtime(stream))); }

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return Result(cudaStreamWaitEvent(Runtime(stream), Runtime(event), flags));
}

// Under the name of CUDA 11.4, which newer headers no longer declare. A graph under construction is
// known by its capture's number.
extern "C" CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* number,
                                              CUgraph* graph, const CUgraphNode**, size_t*) {
    int answer = 0;
    unsigned long long known = 0;
    const CUresult result = Result(ncclEpHostsimCapture(Runtime(stream), &answer, &known));
    *status = static_cast<CUstreamCaptureStatus>(answer);
    *number = known;
    if (graph != nullptr) *graph = reinterpret_cast<CUgraph>(known);
    return result;
}

CUresult cuUserObjectCreate(CUuserObject* object, void* data, CUhostFn release, unsigned references, unsigned flags) {
    const bool is_known = references == 1 && flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC;
    if (!is_known) return CUDA_ERROR_INVALID_VALUE;
    *object = reinterpret_cast<CUuserObject>(new UserObject{data, release});
    return CUDA_SUCCESS;
}

// Of graphs under construction, which take the only reference over.
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned references, unsigned flags) {
    if (references != 1 || flags != CU_GRAPH_USER_OBJECT_MOVE) return CUDA_ERROR_INVALID_VALUE;
    const std::unique_ptr<UserObject> given(reinterpret_cast<UserObject*>(object));
    const auto number = reinterpret_cast<uintptr_t>(graph);
    return Result(ncclEpHostsimGiveToCapture(number, given->release, given->data));
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    return Result(cudaThreadExchangeStreamCaptureMode(reinterpret_cast<cudaStreamCaptureMode*>(mode)));
}

// The stand-ins never give a handle twice.
CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
    const CUresult result = Result(ncclEpHostsimRefuseCapture(Runtime(stream)));
    if (result != CUDA_SUCCESS) return result;
    *id = reinterpret_cast<uintptr_t>(stream);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = kGreatestPriority;
    return CUDA_SUCCESS;
}

// The library's streams come first.
CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
    if (priority != kGreatestPriority) return CUDA_ERROR_INVALID_VALUE;
    return Result(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), flags));
}

CUresult cuStreamDestroy(CUstream stream) { return Result(cudaStreamDestroy(Runtime(stream))); }

CUresult cuEventCreate(CUevent* event, unsigned flags) {
    return Result(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), flags));
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    return Result(cudaEventRecord(Runtime(event), Runtime(stream)));
}

CUresult cuEventQuery(CUevent event) { return Result(cudaEventQuery(Runtime(event))); }

CUresult cuEventDestroy(CUevent event) { return Result(cudaEventDestroy(Runtime(event))); }

// ---- Copies -----------------------------------------------------------------------------------
// The direction is left open: to the stand-ins, memory of another process is no device memory.
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    return Result(cudaMemcpyAsync(Pointer(to), from, bytes, cudaMemcpyDefault, Runtime(stream)));
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return Result(cudaMemcpyAsync(to, Pointer(from), bytes, cudaMemcpyDefault, Runtime(stream)));
}

// ---- Kernels ----------------------------------------------------------------------------------
// The image, a fatbin, is of no use here. A GPU loads when everything that runs on it has ended, and
// so does this; the errors of streams are not reported here. A context may load an image once: CUDA's driver
// keeps memory for each load, also when it is unloaded.
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    (void)Result(ncclEpHostsimWaitForDevice(0));
    {
        unsigned long long context = 0;
        (void)cuCtxGetId(nullptr, &context);
        const std::lock_guard<std::mutex> lock(mutex);
        if (!loaded.insert({context, image}).second) simt::Fail("a context loads its kernels again");
    }
    const char* path = std::getenv("NCCLEP_SIMT_KERNELS");
    *module = reinterpret_cast<CUmodule>(KernelsIn(path != nullptr ? path : kAllKernels));
    return CUDA_SUCCESS;
}

// The library of kernels stays: the threads that ran them have its thread-local memory.
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    static simt::Kernel* const all = KernelsIn(kAllKernels);
    for (simt::Kernel* kernels : {reinterpret_cast<simt::Kernel*>(module), all}) {
        for (; kernels->name != nullptr; ++kernels) {
            if (std::strcmp(kernels->name, name) == 0) {
                *function = reinterpret_cast<CUfunction>(kernels);
                return CUDA_SUCCESS;
            }
        }
    }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) return *value = simt::kMaxThreads, CUDA_SUCCESS;
    if (attribute == CU_FUNC_ATTRIBUTE_PTX_VERSION) return *value = kCodeVersion, CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard<std::mutex> lock(mutex);
    shared_bytes_allowed[function] = static_cast<uint32_t>(value);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void**) {
    if (simt::Setting("NCCLEP_SIMT_STOP_AT_LAUNCH", 0) != 0) (void)raise(SIGSTOP);
    if (config->sharedMemBytes > kSharedBytes) {
        const std::lock_guard<std::mutex> lock(mutex);
        const uint32_t allowed = shared_bytes_allowed[function];
        if (config->sharedMemBytes > allowed) return CUDA_ERROR_INVALID_VALUE;
    }
    const auto* kernel = reinterpret_cast<const simt::Kernel*>(function);
    const auto* first = static_cast<const char*>(params[0]);
    auto status = cudaStreamCaptureStatusNone;
    const CUresult asked = Result(cudaStreamIsCapturing(Runtime(config->hStream), &status));
    if (asked != CUDA_SUCCESS) return asked;
    auto* work = new Work{kernel,
                          {config->gridDimX, config->blockDimX, config->sharedMemBytes, IsEarly(*config)},
                          block_to_hold.exchange(kNoBlock),
                          {first, first + kernel->params_bytes},
                          status == cudaStreamCaptureStatusNone};
    const cudaError_t error = cudaLaunchHostFunc(Runtime(config->hStream), RunKernel, work);
    if (error != cudaSuccess) delete work;
    return Result(error);
}

}  // extern "C"

// Names and versions, from libraries looked up at run time: the program must link and run without a
// driver, and also with another libnccl_ep.so of the same ABI.
#include "programs/ep_bench/machine.h"

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <vector>

namespace ep_bench {
namespace {

// A function of a library that the process has or can load; nullptr if neither works. The library stays loaded.
template <typename Function>
Function* Find(const char* library, const char* name) {
    void* handle = library == nullptr ? RTLD_DEFAULT : dlopen(library, RTLD_LAZY);
    if (library != nullptr && handle == nullptr) return nullptr;
    return reinterpret_cast<Function*>(dlsym(handle, name));
}

std::string GpuName(int device) {
    auto* get_name = Find<int(char*, int, int)>("libcuda.so.1", "cuDeviceGetName");
    char name[128] = "";
    return get_name != nullptr && get_name(name, sizeof(name), device) == 0 ? name : "";
}

std::string DriverVersion() {
    constexpr char kLibrary[] = "libnvidia-ml.so.1";
    auto* init = Find<int()>(kLibrary, "nvmlInit_v2");
    auto* get_version = Find<int(char*, unsigned)>(kLibrary, "nvmlSystemGetDriverVersion");
    auto* shutdown = Find<int()>(kLibrary, "nvmlShutdown");
    char version[96] = "";
    if (init == nullptr || get_version == nullptr || shutdown == nullptr || init() != 0) return "";
    const bool known = get_version(version, sizeof(version)) == 0;
    shutdown();
    return known ? version : "";
}

}  // namespace

std::string LibraryVersion() {
    auto* get_version = Find<ncclResult_t(int*)>(nullptr, "ncclEpGetVersion");
    int version = 0;
    if (get_version == nullptr || get_version(&version) != ncclSuccess) return "";
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
           std::to_string(version % 100);
}

int CountMultiprocessors(const EpEnv& env) {
    int count = 0;
    EP_REQUIRE_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, env.device));
    return count;
}

// Uses the driver's functions: the runtime knows only kernels linked into this program.
unsigned LargestGrid(cudaGraph_t graph) {
    constexpr char kDriver[] = "libcuda.so.1";
    auto* get_nodes = Find<int(CUgraph, CUgraphNode*, size_t*)>(kDriver, "cuGraphGetNodes");
    auto* get_type = Find<int(CUgraphNode, CUgraphNodeType*)>(kDriver, "cuGraphNodeGetType");
    auto* get_kernel = Find<int(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*)>(kDriver, "cuGraphKernelNodeGetParams_v2");
    size_t count = 0;
    if (get_nodes == nullptr || get_type == nullptr || get_kernel == nullptr ||
        get_nodes(graph, nullptr, &count) != 0) {
        return 0;
    }
    std::vector<CUgraphNode> nodes(count);
    if (get_nodes(graph, nodes.data(), &count) != 0) return 0;
    unsigned largest = 0;
    for (const CUgraphNode node : nodes) {
        CUgraphNodeType type{};
        CUDA_KERNEL_NODE_PARAMS kernel{};
        if (get_type(node, &type) == 0 && type == CU_GRAPH_NODE_TYPE_KERNEL && get_kernel(node, &kernel) == 0) {
            largest = std::max(largest, kernel.gridDimX * kernel.gridDimY * kernel.gridDimZ);
        }
    }
    return largest;
}

Machine DescribeMachine(const EpEnv& env) {
    Machine machine;
    machine.library = LibraryVersion();
    EP_REQUIRE_CUDA(cudaDriverGetVersion(&machine.cuda_of_driver));
    EP_REQUIRE_NCCL(ncclGetVersion(&machine.nccl));
    machine.multiprocessors = CountMultiprocessors(env);
    if (!ep_on_hostsim()) {
        machine.gpu = GpuName(env.device);
        machine.driver = DriverVersion();
    }
    return machine;
}

}  // namespace ep_bench

// Times of the later interface, libnccl_ep.so.0: layouts by SM budgets, each the medians of the slowest rank. Values are
// not checked here: test_second does that.
//
//   mpirun -np 2 ep_bench_2 [--layouts ht-flat,ht-expert,ll-expert,ll-rank] [--sms 16,24,all,auto] [--tokens 4096]
//       [--hidden 7168] [--experts 256] [--top-k 8] [--alignment 1] [--iters 8] [--ops 10] [--memory 1] [--json FILE]
//
// `graph` are replays of --ops operations, back to back; `queued` the same calls without a graph. `update` is
// ncclEpUpdateHandle with all counters, in a graph. Host times are inside the calls. With --memory 1 handles are in memory
// of the program's. The file is one that bench/rows.py reads.
#include <dlfcn.h>
#include <nccl_ep.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "harness/base.h"
#include "programs/ep_bench/stats.h"

// For the harness: both modes are everywhere.
extern "C" bool ep_has_high_throughput(const EpEnv*) { return true; }

namespace {

using ep_bench::Figures;
using ep_bench::Samples;
using ep_bench::SlowestRank;
using Names = std::vector<std::string>;

struct Options {
    unsigned tokens = 4096, hidden = 7168, experts = 256, top_k = 8, alignment = 1, iters = 8, ops = 10, memory = 0;
    const char *layouts = "ht-flat,ht-expert", *sms = "16,24,all", *json = nullptr;
};

Names Split(const char* list) {
    Names names;
    std::istringstream stream(list);
    for (std::string name; std::getline(stream, name, ',');) names.push_back(name);
    return names;
}

// Device memory, and a tensor over it.
class Tensor {
   public:
    Tensor(ncclDataType_t type, std::vector<size_t> sizes) : sizes_(std::move(sizes)) {
        size_t bytes = ep_datatype_size(type);
        for (const size_t size : sizes_) bytes *= size;
        view_ = NCCL_EP_TENSOR_INIT;
        view_.ndim = static_cast<unsigned>(sizes_.size());
        view_.datatype = type;
        view_.data = ep_device_alloc(std::max<size_t>(bytes, 16));
        view_.sizes = sizes_.data();
        EP_REQUIRE_CUDA(cudaMemset(view_.data, 0, bytes));
    }
    ~Tensor() { ep_device_free(view_.data); }
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;
    ncclEpTensor_t* get() { return &view_; }

   private:
    std::vector<size_t> sizes_;
    ncclEpTensor_t view_{};
};

// Each token of a rank names different experts, all equally likely; what a rank draws the others can draw, too.
std::vector<int64_t> DrawIds(const Options& options, int rank) {
    std::vector<int64_t> ids;
    uint64_t seed = ep_mix(1, 2, static_cast<uint64_t>(rank));
    for (unsigned token = 0; token < options.tokens; ++token) {
        std::set<int64_t> named;
        while (named.size() < options.top_k) {
            const auto id = static_cast<int64_t>(ep_random_below(&seed, options.experts));
            if (named.insert(id).second) ids.push_back(id);
        }
    }
    return ids;
}

// Rows that travel, and slots of the rank that gets most.
struct Load {
    size_t slots = 0, rows = 0;
};

Load LoadOf(const EpEnv& env, const Options& options, bool by_expert) {
    const size_t local = options.experts / static_cast<unsigned>(env.size);
    std::vector<size_t> of_expert(options.experts), rows(static_cast<size_t>(env.size)), sent(rows);
    for (int rank = 0; rank < env.size; ++rank) {
        const std::vector<int64_t> ids = DrawIds(options, rank);
        for (size_t first = 0; first < ids.size(); first += options.top_k) {
            std::set<size_t> peers;
            for (size_t i = first; i < first + options.top_k; ++i) {
                ++of_expert[static_cast<size_t>(ids[i])];
                peers.insert(static_cast<size_t>(ids[i]) / local);
            }
            for (const size_t peer : peers) {
                ++rows[peer];
                sent[static_cast<size_t>(rank)] += peer != static_cast<size_t>(rank);
            }
        }
    }
    Load load = {*std::max_element(rows.begin(), rows.end()), *std::max_element(sent.begin(), sent.end())};
    for (size_t first = 0; by_expert && first < of_expert.size(); first += local) {
        size_t slots = 0;
        for (size_t i = first; i < first + local; ++i) {
            slots += (of_expert[i] + options.alignment - 1) / options.alignment * options.alignment;
        }
        load.slots = std::max(load.slots, slots);
    }
    return load;
}

// A group, a handle, and the three operations.
class Session {
   public:
    Session(const EpEnv& env, const Options& options, const std::string& layout, unsigned sms)
        : env_(env), ht_(layout[0] == 'h'), by_rank_(layout == "ll-rank"), by_expert_(layout == "ht-expert"),
          load_(LoadOf(env, options, by_expert_)) {
        const size_t ranks = static_cast<size_t>(env.size), local = options.experts / ranks, hidden = options.hidden,
                     tokens = options.tokens, top_k = options.top_k, slots = std::max<size_t>(load_.slots, 1);
        auto group = NCCL_EP_GROUP_CONFIG_INIT;
        group.algorithm = ht_ ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
        group.num_experts = options.experts;
        group.max_dispatch_tokens_per_rank = options.tokens;
        group.max_recv_tokens_per_rank = ht_ ? static_cast<unsigned>(slots) : 0;
        group.max_token_bytes = 2 * options.hidden;
        group.max_num_sms = sms;
        group.num_topk = options.top_k;
        EP_REQUIRE_NCCL(ncclEpCreateGroup(&group_, env.comm, &group));
        const std::vector<size_t> received = ht_         ? std::vector<size_t>{slots, hidden}
                                             : by_rank_ ? std::vector<size_t>{ranks, tokens, hidden}
                                                         : std::vector<size_t>{local, ranks * tokens, hidden};
        ids_ = Make(ncclInt64, {tokens, top_k});
        weights_ = Make(ncclFloat32, {tokens, top_k});
        tokens_ = Make(ncclBfloat16, {tokens, hidden});
        received_ = Make(ncclBfloat16, received);
        combined_ = Make(ncclBfloat16, {tokens, hidden});
        counters_ = Make(ncclInt32, {by_rank_ ? ranks : local});
        if (by_expert_) offsets_ = Make(ncclInt32, {local});
        if (ht_) total_ = Make(ncclInt32, {1});
        const std::vector<size_t> of_row = by_rank_ ? std::vector<size_t>{ranks, tokens, top_k}
                                                    : std::vector<size_t>{slots, top_k};
        if (by_rank_ || layout == "ht-flat") received_ids_ = Make(by_rank_ ? ncclInt32 : ncclInt64, of_row);
        if (ht_ || by_rank_) {
            received_weights_ = Make(ncclFloat32, by_expert_ ? std::vector<size_t>{slots} : of_row);
        }
        ep_upload(ids_->get()->data, DrawIds(options, env.rank).data(), tokens * top_k * sizeof(int64_t));
        OpenHandle(options, layout);
        Update();
        Dispatch();
        Combine();
        EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
    }
    ~Session() {
        EP_REQUIRE_NCCL(ncclEpHandleDestroy(handle_));
        EP_REQUIRE_NCCL(ncclEpGroupDestroy(group_));
    }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    void Update() {
        auto info = NCCL_EP_LAYOUT_INFO_INIT;
        if (ht_) info = Counters();
        EP_REQUIRE_NCCL(ncclEpUpdateHandle(handle_, ids_->get(), ht_ ? &info : nullptr, env_.stream));
    }
    void Dispatch() {
        auto inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
        auto outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        auto info = Counters();
        inputs.tokens = tokens_->get();
        if (ht_ || by_rank_) inputs.topk_weights = weights_->get();
        outputs.tokens = received_->get();
        outputs.topk_weights = Get(received_weights_);
        outputs.topk_idx = Get(received_ids_);
        EP_REQUIRE_NCCL(ncclEpDispatch(handle_, &inputs, &outputs, ht_ ? nullptr : &info, nullptr, env_.stream));
    }
    void Combine() {
        auto inputs = NCCL_EP_COMBINE_INPUTS_INIT;
        auto outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
        inputs.tokens = received_->get();
        outputs.tokens = combined_->get();
        if (!ht_ && !by_rank_) outputs.topk_weights = weights_->get();
        EP_REQUIRE_NCCL(ncclEpCombine(handle_, &inputs, &outputs, nullptr, env_.stream));
    }
    const Load& load() const { return load_; }
    bool ht() const { return ht_; }

   private:
    using Owned = std::unique_ptr<Tensor>;
    static Owned Make(ncclDataType_t type, std::vector<size_t> sizes) {
        return std::make_unique<Tensor>(type, std::move(sizes));
    }
    static ncclEpTensor_t* Get(const Owned& tensor) { return tensor ? tensor->get() : nullptr; }
    void OpenHandle(const Options& options, const std::string& name) {
        const ncclEpLayout_t layout = by_rank_            ? NCCL_EP_LAYOUT_RANK_MAJOR
                                      : name == "ht-flat" ? NCCL_EP_LAYOUT_FLAT
                                                          : NCCL_EP_LAYOUT_EXPERT_MAJOR;
        auto config = NCCL_EP_HANDLE_CONFIG_INIT;
        config.dispatch_output_per_expert_alignment = by_expert_ ? options.alignment : 0;
        const int top_k = static_cast<int>(options.top_k);
        size_t bytes = 0;
        EP_REQUIRE_NCCL(ncclEpHandleMemSize(group_, layout, &config, &bytes, top_k));
        if (options.memory != 0) memory_ = Make(ncclUint8, {bytes});
        EP_REQUIRE_NCCL(ncclEpInitHandle(&handle_, group_, layout, &config, top_k, Get(memory_)));
    }
    ncclEpLayoutInfo_t Counters() {
        auto info = NCCL_EP_LAYOUT_INFO_INIT;
        (by_rank_ ? info.src_rank_counters : info.expert_counters) = counters_->get();
        info.expert_offsets = Get(offsets_);
        info.recv_total_counter = Get(total_);
        return info;
    }

    const EpEnv& env_;
    const bool ht_, by_rank_, by_expert_;
    const Load load_;
    Owned ids_, weights_, tokens_, received_, received_weights_, received_ids_, combined_, counters_, offsets_, total_,
        memory_;
    ncclEpGroup_t group_ = nullptr;
    ncclEpHandle_t handle_ = nullptr;
};

// By the driver's own function: the program links without a driver.
std::string GpuName(int device) {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
    void* found = driver != nullptr ? dlsym(driver, "cuDeviceGetName") : nullptr;
    char name[128] = "";
    if (found != nullptr) reinterpret_cast<int (*)(char*, int, int)>(found)(name, sizeof(name), device);
    return name;
}

using Work = std::function<void()>;

// Rounds of `play`, which is `ops` operations, between two events, behind one that the host runs ahead of.
Figures Time(const EpEnv& env, const Options& options, const Work& play) {
    cudaEvent_t start, end;
    EP_REQUIRE_CUDA(cudaEventCreate(&start));
    EP_REQUIRE_CUDA(cudaEventCreate(&end));
    Samples samples;
    for (unsigned i = 0; i <= options.iters; ++i) {
        ep_barrier();
        play();
        EP_REQUIRE_CUDA(cudaEventRecord(start, env.stream));
        for (int round = 0; round < 2; ++round) play();
        EP_REQUIRE_CUDA(cudaEventRecord(end, env.stream));
        EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
        float milliseconds = 0;
        EP_REQUIRE_CUDA(cudaEventElapsedTime(&milliseconds, start, end));
        samples.push_back(1e3 * static_cast<double>(milliseconds) / (2 * options.ops));
    }
    ep_bench::DropFirst(&samples);
    return SlowestRank(samples);
}

Figures TimeGraph(const EpEnv& env, const Options& options, const Work& play) {
    if (ep_on_host_backend()) return Time(env, options, play);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    EP_REQUIRE_CUDA(cudaStreamBeginCapture(env.stream, cudaStreamCaptureModeThreadLocal));
    play();
    EP_REQUIRE_CUDA(cudaStreamEndCapture(env.stream, &graph));
    EP_REQUIRE_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    const Figures figures =
        Time(env, options, [&] { EP_REQUIRE_CUDA(cudaGraphLaunch(executable, env.stream)); });
    EP_REQUIRE_CUDA(cudaGraphExecDestroy(executable));
    EP_REQUIRE_CUDA(cudaGraphDestroy(graph));
    return figures;
}

Figures TimeHost(const EpEnv& env, const Options& options, const Work& call) {
    Samples samples;
    for (unsigned i = 0; i < 4 * options.iters; ++i) {
        const auto start = std::chrono::steady_clock::now();
        call();
        samples.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
        if (i % 8 == 7) EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
    }
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
    return SlowestRank(samples);
}

std::string Json(const std::map<std::string, Figures>& times) {
    std::string json;
    for (const auto& [name, it] : times) {
        char text[128];
        snprintf(text, sizeof(text), R"("%s": {"median_us": %.4f, "min_us": %.4f, "p99_us": %.4f})", name.c_str(),
                 it.median_us, it.min_us, it.p99_us);
        json += (json.empty() ? "{" : ", ") + std::string(text);
    }
    return json + "}";
}

// One run of the file: a layout with one budget of SMs.
std::string Run(const EpEnv& env, const Options& options, const std::string& layout, const std::string& sms,
                const std::string& command) {
    int multiprocessors = 0;
    EP_REQUIRE_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, env.device));
    const auto all = static_cast<unsigned>(multiprocessors);
    const unsigned budget = sms == "auto" ? 0 : sms == "all" ? all : static_cast<unsigned>(std::stoul(sms));
    size_t before = 0, after = 0, total = 0;
    EP_REQUIRE_CUDA(cudaMemGetInfo(&before, &total));
    Session session(env, options, layout, budget);
    EP_REQUIRE_CUDA(cudaMemGetInfo(&after, &total));
    const std::map<std::string, Work> calls = {{"dispatch", [&] { session.Dispatch(); }},
                                               {"combine", [&] { session.Combine(); }},
                                               {"update", [&] { session.Update(); }},
                                               {"pair", [&] { session.Dispatch(), session.Combine(); }}};
    std::map<std::string, Figures> queued, graph, host;
    for (const auto& [name, call] : calls) {
        if (name == "update" && !session.ht()) continue;
        const auto play = [&, call = call] {
            for (unsigned i = 0; i < options.ops; ++i) call();
        };
        queued[name] = Time(env, options, play);
        graph[name] = TimeGraph(env, options, play);
        host[name] = TimeHost(env, options, call);
    }
    if (env.rank == 0) {
        printf("%-9s sms %-4s slots %-6zu graph: dispatch %7.1f combine %7.1f pair %7.1f update %5.1f | host: dispatch "
               "%5.2f combine %5.2f update %5.2f\n",
               layout.c_str(), sms.c_str(), session.load().slots, graph["dispatch"].median_us,
               graph["combine"].median_us, graph["pair"].median_us, graph["update"].median_us,
               host["dispatch"].median_us, host["combine"].median_us, host["update"].median_us);
        fflush(stdout);
    }
    int nccl = 0;
    EP_REQUIRE_NCCL(ncclGetVersion(&nccl));
    char date[16];
    const time_t now = time(nullptr);
    strftime(date, sizeof(date), "%F", gmtime(&now));
    std::ostringstream json;
    json << R"({"date": ")" << date << R"(", "command": ")" << command << R"(", "machine": {"gpu": ")" << GpuName(env.device)
         << R"(", "nccl": )" << nccl << R"(, "multiprocessors": )" << all << R"(}, "config": {"interface": "later", )"
         << R"("algorithm": ")" << layout.substr(0, 2) << R"(", "layout": ")" << layout.substr(3) << R"(", "backend": ")"
         << (ep_on_hostsim() ? "host" : "cuda") << R"(", "ranks": )" << env.size << R"(, "nodes": 1, "hidden": )"
         << options.hidden << R"(, "top_k": )" << options.top_k << R"(, "experts": )" << options.experts
         << R"(, "masked": )" << (session.ht() ? 0 : 10) << R"(, "routing": "uniform", "alignment": )" << options.alignment
         << R"(, "channels": )" << (budget == 0 ? "null" : std::to_string(budget / 2)) << R"(, "dtype": "bfloat16"},)"
         << R"( "results": [{"tokens": )" << options.tokens << R"(, "wrong_rows": null, "wire_rows_in_max": )"
         << session.load().rows << R"(, "wire_rows_out_max": )" << session.load().rows << R"(, "library_bytes": )"
         << before - std::min(before, after) << R"(, "queued": )" << Json(queued) << R"(, "graph": )" << Json(graph)
         << R"(, "host_call": )" << Json(host) << "}]}";
    return json.str();
}

bool Read(int argc, char** argv, Options* options) {
    const EpOption table[] = {{"--tokens", &options->tokens, nullptr},   {"--hidden", &options->hidden, nullptr},
                              {"--experts", &options->experts, nullptr}, {"--top-k", &options->top_k, nullptr},
                              {"--iters", &options->iters, nullptr},     {"--alignment", &options->alignment, nullptr},
                              {"--ops", &options->ops, nullptr},         {"--memory", &options->memory, nullptr},
                              {"--layouts", nullptr, &options->layouts}, {"--sms", nullptr, &options->sms},
                              {"--json", nullptr, &options->json}};
    return ep_read_options(argc, argv, table, std::size(table), nullptr) && options->iters > 0 && options->ops > 0;
}

}  // namespace

int main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    Options options;
    if (!Read(argc, argv, &options) || options.experts % static_cast<unsigned>(env.size) != 0) {
        if (env.rank == 0) fprintf(stderr, "usage: the head of programs/ep_bench_2/main.cpp\n");
        ep_release(&env);
        return 2;
    }
    std::string runs, command = "mpirun -np " + std::to_string(env.size) + " ep_bench_2";
    for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
    for (const std::string& layout : Split(options.layouts)) {
        for (const std::string& sms : Split(options.sms)) {
            runs += (runs.empty() ? "" : ",\n") + Run(env, options, layout, sms, command);
        }
    }
    FILE* file = env.rank == 0 && options.json != nullptr ? fopen(options.json, "w") : nullptr;
    if (file != nullptr) {
        fprintf(file, "{\"label\": \"this library\", \"runs\": [\n%s\n]}\n", runs.c_str());
        fclose(file);
    }
    ep_release(&env);
    return 0;
}

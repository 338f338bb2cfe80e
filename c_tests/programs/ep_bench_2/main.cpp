// Times of the later interface, libnccl_ep.so.0, by layouts and budgets of SMs: medians of the slowest rank. Nothing is
// checked here: test_second does that. Options with their defaults:
//   --layouts ht-flat,ht-expert (ll-expert,ll-rank) --sms 16,24,all (auto) --tokens 4096 --hidden 7168 --experts 256
//   --top-k 8 --alignment 1 --iters 8 --ops 10 --memory 0 (1: handles in memory of the program's) --json FILE
// `graph` are replays of --ops operations, back to back; `update` is ncclEpUpdateHandle with all counters. Host times
// are inside the calls. bench/rows.py reads the file.
#include <nccl_ep.h>

#include <cstdio>
#include <ctime>
#include <map>
#include <memory>
#include <set>

#include "harness/base.h"
#include "harness/options.hpp"
#include "programs/ep_bench/graph.h"
#include "programs/ep_bench/json.h"
#include "programs/ep_bench/machine.h"

// For the harness: both modes are everywhere.
extern "C" bool ep_has_high_throughput(const EpEnv*) { return true; }

namespace {

using ep_bench::Enqueue;
using ep_bench::Object;
using ep_bench::Samples;
using Sizes = std::vector<size_t>;
using Times = std::map<std::string, ep_bench::Figures>;

struct Options {
    unsigned tokens = 4096, hidden = 7168, experts = 256, top_k = 8, alignment = 1, iters = 8, ops = 10, memory = 0;
    const char *layouts = "ht-flat,ht-expert", *sms = "16,24,all", *json = nullptr;
};

// Device memory, and a tensor over it.
struct Tensor {
    Tensor(ncclDataType_t type, Sizes extents) : sizes(std::move(extents)) {
        size_t bytes = ep_datatype_size(type);
        for (const size_t size : sizes) bytes *= size;
        view.ndim = static_cast<unsigned>(sizes.size());
        view.datatype = type;
        view.data = ep_device_alloc(bytes);
        view.sizes = sizes.data();
        EP_REQUIRE_CUDA(cudaMemset(view.data, 0, bytes));
    }
    ~Tensor() { ep_device_free(view.data); }
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;
    Sizes sizes;
    ncclEpTensor_t view = NCCL_EP_TENSOR_INIT;
};

// Each token names different experts, all equally likely; what a rank draws the others can draw, too.
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

// Of the rank that gets most: slots of its tensors, and rows from others.
struct Load {
    size_t slots = 0, rows = 0;
};

Load LoadOf(int ranks, const Options& options, bool by_expert) {
    const size_t local = options.experts / static_cast<unsigned>(ranks);
    Sizes of_expert(options.experts), kept(static_cast<size_t>(ranks)), rows(kept);
    for (size_t rank = 0; rank < rows.size(); ++rank) {
        const std::vector<int64_t> ids = DrawIds(options, static_cast<int>(rank));
        for (size_t first = 0; first < ids.size(); first += options.top_k) {
            std::set<size_t> peers;
            for (size_t i = first; i < first + options.top_k; ++i) {
                ++of_expert[static_cast<size_t>(ids[i])];
                peers.insert(static_cast<size_t>(ids[i]) / local);
            }
            for (const size_t peer : peers) ++(peer == rank ? kept : rows)[peer];
        }
    }
    Load load;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
        size_t slots = by_expert ? 0 : kept[rank] + rows[rank];
        for (size_t i = rank * local; by_expert && i < (rank + 1) * local; ++i) {
            slots += (of_expert[i] + options.alignment - 1) / options.alignment * options.alignment;
        }
        load = {std::max(load.slots, slots), std::max(load.rows, rows[rank])};
    }
    return load;
}

// A group, a handle, and the operations.
class Session {
   public:
    Session(const EpEnv& env, const Options& options, const std::string& layout, unsigned sms)
        : env_(env), ht_(layout[0] == 'h'), by_rank_(layout == "ll-rank"), zones_(layout == "ht-expert"),
          load(LoadOf(env.size, options, zones_)) {
        const size_t ranks = static_cast<size_t>(env.size), local = options.experts / ranks, tokens = options.tokens;
        const Sizes slots = ht_ ? Sizes{load.slots} : by_rank_ ? Sizes{ranks, tokens} : Sizes{local, ranks * tokens};
        const auto wide = [&](Sizes sizes, size_t extent) { return sizes.push_back(extent), sizes; };
        Make("ids", ncclInt64, {tokens, options.top_k});
        Make("weights", ncclFloat32, {tokens, options.top_k});
        Make("tokens", ncclBfloat16, {tokens, options.hidden});
        Make("combined", ncclBfloat16, {tokens, options.hidden});
        Make("received", ncclBfloat16, wide(slots, options.hidden));
        Make("counters", ncclInt32, {by_rank_ ? ranks : local});
        if (zones_) Make("offsets", ncclInt32, {local});
        if (ht_) Make("total", ncclInt32, {1});
        if (ht_ || by_rank_) Make("weights_out", ncclFloat32, zones_ ? slots : wide(slots, options.top_k));
        if (by_rank_ || layout == "ht-flat") Make("ids_out", ht_ ? ncclInt64 : ncclInt32, wide(slots, options.top_k));
        ep_upload(Get("ids")->data, DrawIds(options, env.rank).data(), tokens * options.top_k * sizeof(int64_t));
        auto group = NCCL_EP_GROUP_CONFIG_INIT;
        group.algorithm = ht_ ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
        group.num_experts = options.experts;
        group.max_dispatch_tokens_per_rank = options.tokens;
        group.max_recv_tokens_per_rank = ht_ ? static_cast<unsigned>(load.slots) : 0;
        group.max_token_bytes = 2 * options.hidden;
        group.max_num_sms = sms;
        group.num_topk = options.top_k;
        EP_REQUIRE_NCCL(ncclEpCreateGroup(&group_, env.comm, &group));
        const auto kind = layout == "ht-flat" ? NCCL_EP_LAYOUT_FLAT
                          : by_rank_          ? NCCL_EP_LAYOUT_RANK_MAJOR
                                              : NCCL_EP_LAYOUT_EXPERT_MAJOR;
        auto config = NCCL_EP_HANDLE_CONFIG_INIT;
        if (zones_) config.dispatch_output_per_expert_alignment = options.alignment;
        const int top_k = static_cast<int>(options.top_k);
        size_t bytes = 0;
        EP_REQUIRE_NCCL(ncclEpHandleMemSize(group_, kind, &config, &bytes, top_k));
        if (options.memory != 0) Make("memory", ncclUint8, {bytes});
        EP_REQUIRE_NCCL(ncclEpInitHandle(&handle_, group_, kind, &config, top_k, Get("memory")));
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
        const auto info = Counters();
        EP_REQUIRE_NCCL(ncclEpUpdateHandle(handle_, Get("ids"), ht_ ? &info : nullptr, env_.stream));
    }
    void Dispatch() {
        auto inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
        auto outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
        const auto info = Counters();
        inputs.tokens = Get("tokens");
        inputs.topk_weights = ht_ || by_rank_ ? Get("weights") : nullptr;
        outputs.tokens = Get("received");
        outputs.topk_weights = Get("weights_out");
        outputs.topk_idx = Get("ids_out");
        EP_REQUIRE_NCCL(ncclEpDispatch(handle_, &inputs, &outputs, ht_ ? nullptr : &info, nullptr, env_.stream));
    }
    void Combine() {
        auto inputs = NCCL_EP_COMBINE_INPUTS_INIT;
        auto outputs = NCCL_EP_COMBINE_OUTPUTS_INIT;
        inputs.tokens = Get("received");
        outputs.tokens = Get("combined");
        outputs.topk_weights = ht_ || by_rank_ ? nullptr : Get("weights");
        EP_REQUIRE_NCCL(ncclEpCombine(handle_, &inputs, &outputs, nullptr, env_.stream));
    }

   private:
    void Make(const char* name, ncclDataType_t type, Sizes sizes) {
        tensors_[name] = std::make_unique<Tensor>(type, std::move(sizes));
    }
    ncclEpTensor_t* Get(const char* name) {
        const auto found = tensors_.find(name);
        return found != tensors_.end() ? &found->second->view : nullptr;
    }
    ncclEpLayoutInfo_t Counters() {
        auto info = NCCL_EP_LAYOUT_INFO_INIT;
        (by_rank_ ? info.src_rank_counters : info.expert_counters) = Get("counters");
        info.expert_offsets = Get("offsets");
        info.recv_total_counter = Get("total");
        return info;
    }

    const EpEnv& env_;
    const bool ht_, by_rank_, zones_;
    std::map<std::string, std::unique_ptr<Tensor>> tensors_;
    ncclEpGroup_t group_ = nullptr;
    ncclEpHandle_t handle_ = nullptr;

   public:
    const Load load;
};

// In a graph, where something can be captured.
ep_bench::Figures TimeGraph(const EpEnv& env, const Options& options, const Enqueue& call) {
    constexpr ep_bench::Pace kPace = {1, 1};
    const unsigned iterations = options.iters + 1;
    if (!ep_on_host_backend()) {
        return ep_bench::Graph(env.stream, options.ops, call).TimeReplays(env, kPace, iterations);
    }
    const auto play = [&] {
        for (unsigned i = 0; i < options.ops; ++i) call();
    };
    return ep_bench::TimeReplays(env, kPace, iterations, options.ops, play);
}

ep_bench::Figures TimeHost(const EpEnv& env, const Options& options, const Enqueue& call) {
    Samples samples;
    for (unsigned i = 1; i <= 8 * options.iters; ++i) {
        ep_bench::TimeCall(call, &samples);
        if (i % 8 == 0) EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
    }
    return ep_bench::SlowestRank(samples);
}

std::string Today() {
    char date[16];
    const time_t now = time(nullptr);
    strftime(date, sizeof(date), "%F", gmtime(&now));
    return date;
}

// One run of the file: a layout with one budget of SMs.
std::string Run(const EpEnv& env, const Options& options, const std::string& layout, const std::string& sms,
                const std::string& command) {
    const bool ht = layout[0] == 'h';
    const ep_bench::Machine machine = ep_bench::DescribeMachine(env);
    const int budget = sms == "auto" ? 0 : sms == "all" ? machine.multiprocessors : std::stoi(sms);
    Session session(env, options, layout, static_cast<unsigned>(budget));
    const std::map<std::string, Enqueue> calls = {{"dispatch", [&] { session.Dispatch(); }},
                                                  {"combine", [&] { session.Combine(); }},
                                                  {"pair", [&] { session.Dispatch(), session.Combine(); }},
                                                  {"update", [&] { session.Update(); }}};
    Times graph, host;
    for (const auto& [name, call] : calls) {
        if (name == "update" && !ht) continue;
        graph[name] = TimeGraph(env, options, call);
        host[name] = TimeHost(env, options, call);
    }
    const auto about = Object("gpu", machine.gpu, "nccl", machine.nccl, "multiprocessors", machine.multiprocessors);
    const auto config = Object(
        "interface", "later", "algorithm", layout.substr(0, 2), "layout", layout.substr(3), "backend",
        ep_on_hostsim() ? "host" : "cuda", "ranks", env.size, "hidden", options.hidden, "top_k", options.top_k,
        "experts", options.experts, "masked", ht ? 0 : 10, "routing", "uniform", "alignment", options.alignment,
        "channels", ep_bench::If(budget != 0, budget / 2), "dtype", "bfloat16");
    const auto result = Object("tokens", options.tokens, "wrong_rows", ep_bench::Json{"null"}, "wire_rows_in_max",
                               session.load.rows, "wire_rows_out_max", session.load.rows, "graph", graph, "host_call",
                               host);
    const auto us = [&](Times& times, const char* name) { return times[name].median_us; };
    if (env.rank == 0) {
        printf("%-9s SMs %-4s slots %-6zu graph: dispatch %6.1f combine %6.1f pair %6.1f update %5.1f, host: %.2f %.2f "
               "%.2f %.2f us\n", layout.c_str(), sms.c_str(), session.load.slots, us(graph, "dispatch"),
               us(graph, "combine"), us(graph, "pair"), us(graph, "update"), us(host, "dispatch"), us(host, "combine"),
               us(host, "pair"), us(host, "update"));
        fflush(stdout);
    }
    return Object("date", Today(), "command", command, "machine", about, "config", config, "results",
                  ep_bench::Json{"[" + result.text + "]"}).text;
}

bool Fit(const Options& options, unsigned ranks) {
    static const std::set<std::string> kLayouts = {"ht-flat", "ht-expert", "ll-expert", "ll-rank"};
    for (const std::string& layout : ep::Split(options.layouts, ',')) {
        if (kLayouts.count(layout) == 0) return false;
    }
    for (const std::string& sms : ep::Split(options.sms, ',')) {
        const bool is_number = sms.size() <= 5 && sms.find_first_not_of("0123456789") == std::string::npos;
        if (sms.empty() || (sms != "auto" && sms != "all" && !is_number)) return false;
    }
    const bool named = options.top_k > 0 && options.top_k <= options.experts && options.experts % ranks == 0;
    return named && options.alignment > 0 && options.iters > 0 && options.ops > 0;
}

}  // namespace

int main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    Options options;
    const EpOption table[] = {{"--tokens", &options.tokens, nullptr},   {"--hidden", &options.hidden, nullptr},
                              {"--experts", &options.experts, nullptr}, {"--top-k", &options.top_k, nullptr},
                              {"--iters", &options.iters, nullptr},     {"--alignment", &options.alignment, nullptr},
                              {"--ops", &options.ops, nullptr},         {"--memory", &options.memory, nullptr},
                              {"--layouts", nullptr, &options.layouts}, {"--sms", nullptr, &options.sms},
                              {"--json", nullptr, &options.json}};
    if (!ep_read_options(argc, argv, table, std::size(table), nullptr) ||
        !Fit(options, static_cast<unsigned>(env.size))) {
        if (env.rank == 0) fprintf(stderr, "usage: the head of c_tests/programs/ep_bench_2/main.cpp\n");
        ep_release(&env);
        return 2;
    }
    FILE* file = env.rank == 0 && options.json != nullptr ? fopen(options.json, "w") : nullptr;
    EP_REQUIRE(env.rank != 0 || options.json == nullptr || file != nullptr);
    std::string runs, command = "mpirun -np " + std::to_string(env.size) + " ep_bench_2";
    for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
    for (const std::string& layout : ep::Split(options.layouts, ',')) {
        for (const std::string& sms : ep::Split(options.sms, ',')) {
            runs += (runs.empty() ? "" : ",\n") + Run(env, options, layout, sms, command);
        }
    }
    bool written = true;
    if (file != nullptr) {
        fprintf(file, "{\"label\": \"this library\", \"runs\": [\n%s\n]}\n", runs.c_str());
        written = fclose(file) == 0;
    }
    ep_release(&env);
    return written ? 0 : 1;
}

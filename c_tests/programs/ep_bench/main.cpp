// ep_bench: how fast are dispatch and combine, and are their results right? Options, routing, byte
// formulas and summary lines are those of the reference's program of this name; the further ways of
// timing, the table, the sweep, JSON and the exit status that follows the validation are ours.
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "harness/harness.h"
#include "harness/nodes.h"
#include "harness/options.hpp"
#include "programs/ep_bench/graph.h"
#include "programs/ep_bench/machine.h"
#include "programs/ep_bench/network.h"
#include "programs/ep_bench/options.h"
#include "programs/ep_bench/report.h"
#include "programs/ep_bench/result.h"
#include "programs/ep_bench/routing.h"
#include "programs/ep_bench/session.h"
#include "programs/ep_bench/timing.h"
#include "programs/ep_bench/validate.h"

namespace ep_bench {
namespace {

Wrong ValidateAll(const EpEnv& env, const Options& options, const Routing& routing, Session* session, Graphs* graphs) {
    Wrong wrong = Validate(env, options, routing, session,
                           {[&] { session->CastAndDispatch(); }, [&] { session->Combine(); }});
    if (graphs == nullptr) return wrong;
    Graph& dispatch = graphs->cast ? graphs->cast->dispatch : graphs->dispatch;
    const Wrong replayed =
        Validate(env, options, routing, session,
                 {[&] { dispatch.Launch(env.stream); }, [&] { graphs->combine.Launch(env.stream); }, true});
    wrong.dispatch_rows += replayed.dispatch_rows;
    wrong.combine_rows += replayed.combine_rows;
    wrong.cast_rows += replayed.cast_rows;
    return wrong;
}

Routing MakeRouting(const EpEnv& env, const Options& options, const Tokens& tokens) {
    const Shape shape = {static_cast<unsigned>(env.size),
                         tokens,
                         options.max_tokens > 0 ? options.max_tokens : Largest(tokens),
                         options.top_k,
                         options.experts,
                         options.low_latency() ? options.masked : 0,
                         options.routing,
                         options.zipf_exponent};
    return Routing(shape, static_cast<unsigned>(env.rank));
}

// What the first group of a process leaves behind, such as connections of NCCL and code of kernels.
// Measured apart, as it would otherwise count as memory of the first measurement.
double MeasureFirstUse(EpEnv* env, const Options& options) {
    const double before = FreeBytes();
    {
        const Routing routing = MakeRouting(*env, options, options.tokens[0]);
        Session session(env, options, routing);
        session.Dispatch();
        session.Combine();
    }
    return before - FreeBytes();
}

// NCCL with the messages of the session's operations, on several nodes.
std::optional<OperationTimes> MeasureNcclAlone(const EpEnv& env, const Options& options, const Network& network) {
    if (ep_num_nodes() == 1 || !HasMessages()) return std::nullopt;
    NcclAlone alone(env, network);
    return MeasureOperations(env, options, {[&] { alone.Dispatch(); }, [&] { alone.Combine(); }, [] {}});
}

Result RunOne(EpEnv* env, const Options& options, const Tokens& tokens) {
    const Routing routing = MakeRouting(*env, options, tokens);
    Session session(env, options, routing);
    ep_watchdog_at_case("warm-up");
    WarmUp(*env, options, &session);
    session.NoteMemoryOfUse();
    const Network network = CountNetwork(options, routing);
    ep_watchdog_at_case("calls");
    Timing timing = Measure(*env, options, &session);
    ep_watchdog_at_case("NCCL alone");
    timing.nccl_alone = MeasureNcclAlone(*env, options, network);
    // After the warm-up: code that loads at its first use may not be loaded during a capture.
    ep_watchdog_at_case("graphs");
    std::optional<Graphs> graphs;
    if (options.use_cuda_graph) {
        graphs.emplace(*env, options.graph_ops, session.MakeCalls());
        timing.graph = TimeGraphs(*env, options, &*graphs);
        if (options.between_code) TimeCold(*env, options, session.MakeCalls(), &timing);
    }
    Graphs* const replayed = graphs ? &*graphs : nullptr;
    const Traffic traffic = CountTraffic(routing, options.low_latency());
    Result result = Collect(*env, timing, {traffic, network}, session, routing.shape());
    if (graphs) result.blocks = {graphs->dispatch.Blocks(), graphs->combine.Blocks()};
    if (options.validate) {
        ep_watchdog_at_case("validation");
        result.wrong = ValidateAll(*env, options, routing, &session, replayed);
    }
    return result;
}

// True if no process found an error and the results could be written.
bool RunAll(EpEnv* env, const Options& options) {
    const bool on_hostsim = ep_on_hostsim();
    const bool prints = env->rank == 0;
    if (prints) PrintHeader(options, env->size, on_hostsim);
    const double first_use_bytes = MeasureFirstUse(env, options);
    std::vector<Result> results;
    bool right = true;
    for (const Tokens& tokens : options.tokens) {
        results.push_back(RunOne(env, options, tokens));
        if (prints) PrintResult(options, results.back());
        const auto& wrong = results.back().wrong;
        right = right && (!wrong || wrong->none());
    }
    if (prints) PrintTable(options, results);
    if (prints) PrintFirstUse(first_use_bytes);
    if (prints && !options.json_file.empty() &&
        !WriteJson(options, DescribeMachine(*env), env->size, {results, first_use_bytes})) {
        fprintf(stderr, "ep_bench: --json: cannot write \"%s\"\n", options.json_file.c_str());
        right = false;
    }
    return right;
}

constexpr int kNoCapture = 2;  // exit status

// NCCL reads this when the communicator is created.
void DisableNvlink() {
    setenv("NCCL_P2P_DISABLE", "1", 1);
    setenv("NCCL_SHM_DISABLE", "1", 1);
}

// What the command line asks to be told, or why it is refused, instead of a measurement.
void Answer(const ParsedOptions& parsed) {
    if (!parsed.error.empty()) {
        ep::PrintRefusal("ep_bench", parsed.error);
    } else if (parsed.help) {
        printf("%s", kUsage);
    } else {
        const std::string library = LibraryVersion();
        printf("ep_bench %d.%d.%d, libnccl_ep %s\n", NCCL_EP_MAJOR, NCCL_EP_MINOR, NCCL_EP_PATCH,
               library.empty() ? "of an unknown version" : library.c_str());
    }
}

}  // namespace
}  // namespace ep_bench

int main(int argc, char** argv) {
    ep_bench::ParsedOptions parsed = ep_bench::ParseOptions(argc, argv, ep_on_hostsim());
    EpEnv env;
    ep_init_mpi(&env, &argc, &argv);
    const bool asks = parsed.help || parsed.version;
    if (parsed.error.empty() && !asks) {
        parsed.error = ep_bench::ApplyRanks(static_cast<unsigned>(env.size), &parsed.options);
    }
    if (asks || !parsed.error.empty()) {
        if (env.rank == 0) ep_bench::Answer(parsed);
        ep_release(&env);
        return parsed.error.empty() ? 0 : 1;
    }
    if (parsed.options.disable_nvlink && parsed.options.low_latency()) ep_bench::DisableNvlink();
    ep_init_device(&env);
    if (parsed.options.use_cuda_graph) {
        const std::string why = ep_bench::WhyNoCapture(env.stream);
        if (!why.empty()) {
            const char* option = parsed.options.between_code ? "--between code" : "--use-cuda-graph";
            if (env.rank == 0) fprintf(stderr, "ep_bench: %s: %s\n", option, why.c_str());
            ep_release(&env);
            return ep_bench::kNoCapture;
        }
    }
    if (parsed.options.channels == ep_bench::kAllChannels) {
        const int channels = ep_bench::CountMultiprocessors(env) / 2;
        parsed.options.channels = static_cast<unsigned>(channels);
    }
    const bool right = ep_bench::RunAll(&env, parsed.options);
    const bool leaked = ep_counted_live() != 0 || ep_has_leaks();
    if (leaked) fprintf(stderr, "[rank %d] memory of the library is left over\n", env.rank);
    ep_release(&env);
    return right && !leaked ? 0 : 1;
}

// Random operations on one to three handles of either mode, checked as late as the outputs allow: low-latency ones
// blocking and staged, repeated, with ids that change in between; high-throughput ones forward, cached and backward,
// with and without optional tensors.
#include <unistd.h>

#include <functional>

#include "harness/graphs.h"
#include "suites/random/config.h"

namespace test_random {
namespace {

// Chooses the next step. `Shared` choices are equal on all ranks; delays are each rank's own.
class Course {
   public:
    Course(const EpEnv& env, const Config& config)
        : env_(env),
          delays_(config.delays),
          graphs_(config.graphs),
          shared_(ep_mix(config.seed, config.index, 3)),
          own_(ep_mix(config.seed, config.index, 4 + static_cast<uint64_t>(env.rank))) {}

    unsigned Shared(unsigned bound) { return static_cast<unsigned>(ep_random_below(&shared_, bound)); }
    bool OneIn(unsigned n) { return Shared(n) == 0; }
    uint64_t SharedSeed() { return ep_random(&shared_); }

    void MaybeDelay() {
        constexpr unsigned kOneIn = 4;
        constexpr unsigned kMostMicroseconds = 400;
        if (!delays_ || ep_random_below(&own_, kOneIn) != 0) return;
        usleep(static_cast<useconds_t>(ep_random_below(&own_, kMostMicroseconds)));
    }

    // Calls `enqueue`, which gives work to the stream of the environment; or captures it, and launches the graph once
    // or twice.
    void Enqueue(const std::function<void()>& enqueue) {
        if (!graphs_ || !ep_begin_capture(env_.stream)) return enqueue();
        enqueue();
        const cudaGraphExec_t graph = ep_instantiate(ep_end_capture(env_.stream));
        const unsigned launches = 1 + Shared(2);
        Note("in a graph, launches:", launches);
        for (unsigned i = 0; i < launches; ++i) EP_CHECK_CUDA(cudaGraphLaunch(graph, env_.stream));
        EP_CHECK_CUDA(cudaGraphExecDestroy(graph));
    }

    // A format for the dispatches to come, where another one is due.
    bool NewFormat(const Config& config, size_t handle, RefFormat* format) {
        if (!OneIn(2)) return false;
        *format = ref_format_draw(SharedSeed(), config.group.row_bytes);
        char name[256];
        ref_format_name(format, name, sizeof(name));
        Note(name, handle);
        return true;
    }

    // Adds to the history that is printed when something differs.
    void Note(const char* what, size_t handle) {
        history_ += (history_.empty() ? "  done: " : ", ") + std::string(what) + " " + std::to_string(handle);
    }
    const std::string& history() const { return history_; }

   private:
    const EpEnv& env_;
    bool delays_;
    bool graphs_;
    uint64_t shared_;
    uint64_t own_;
    std::string history_;
};

struct Handle {
    RefRun run{};
    bool dispatched = false;
    bool staged = false;
    bool staged_is_dispatch = false;
    bool unchecked_dispatch = false;
    bool unchecked_combine = false;
};

class Play {
   public:
    Play(const EpEnv& env, ncclEpGroup_t group, const Config& config)
        : env_(env), config_(config), course_(env, config), handles_(config.handles.size()) {
        const bool ht = !config.group.low_latency;
        for (size_t i = 0; i < handles_.size(); ++i) {
            const HandlePlan& plan = config.handles[i];
            const RefShape shape = {config.group.num_experts, config.group.max_tokens, plan.top_k, plan.datatype,
                                    plan.hidden};
            RefRun* run = &handles_[i].run;
            course_.MaybeDelay();
            *run = ref_run_open_with(&env, group, &shape, plan.style, plan.uneven,
                                     ref_opening(ht, plan.rows, plan.counter, plan.seed));
            run->variation = static_cast<unsigned>(plan.seed);
            run->without_counter = plan.counter == kHtNoCounter;
        }
        if (!ht && config.graphs) MakeViews();
    }

    void Step() {
        const size_t i = course_.Shared(static_cast<unsigned>(handles_.size()));
        Handle& handle = handles_[i];
        course_.MaybeDelay();
        handle.run.ht ? StepHt(i) : StepLl(i);
        if (course_.OneIn(3) && !handle.staged) Check(handle);
    }

    std::string Finish() {
        for (size_t i = 0; i < handles_.size(); ++i) {
            Handle& handle = handles_[i];
            if (handle.staged && !course_.OneIn(4)) Complete(i);
            if (handle.staged) {
                GiveUp(i);
            } else {
                Check(handle);
            }
            ref_run_close(&handle.run);
        }
        return course_.history();
    }

   private:
    // Outputs must be checked before the next operation of the kind poisons them, and the expected
    // combine must be computed before the ids change.
    void Check(Handle& handle) {
        if (!handle.unchecked_dispatch && !handle.unchecked_combine) return;
        if (handle.unchecked_dispatch) ref_check_dispatch(&handle.run);
        if (handle.unchecked_combine) ref_check_combine(&handle.run);
        handle.unchecked_dispatch = false;
        handle.unchecked_combine = false;
    }

    // A graph completes what it begins.
    void Launch(size_t i, bool dispatch, RefPass pass) {
        Handle& handle = handles_[i];
        const bool stage = pass.send_only && !handle.run.ht;
        (dispatch ? ref_prepare_dispatch : ref_prepare_combine)(&handle.run);
        course_.MaybeDelay();
        course_.Enqueue([&] {
            EP_CHECK_NCCL((dispatch ? ref_launch_dispatch : ref_launch_combine)(&handle.run, pass, env_.stream));
            if (stage && config_.graphs) CompleteRun(i);
        });
        handle.staged = stage && !config_.graphs;
        handle.staged_is_dispatch = dispatch;
        (dispatch ? handle.unchecked_dispatch : handle.unchecked_combine) = !handle.staged;
    }

    void MaybeNewFormat(size_t i) {
        RefFormat format;
        if (course_.NewFormat(config_, i, &format)) ref_run_set_format(&handles_[i].run, &format);
    }

    void Reroute(size_t i, const char* what) {
        course_.Note(what, i);
        const auto style = static_cast<RefStyle>(course_.Shared(kRefNumStyles));
        ref_run_draw(&handles_[i].run, style, course_.SharedSeed());
    }

    // ---- Low latency

    void StepLl(size_t i) {
        const Handle& handle = handles_[i];
        if (handle.staged) {
            Complete(i);
        } else if (!handle.dispatched || course_.OneIn(2)) {
            DispatchLl(i);
        } else if (!course_.OneIn(4)) {
            CombineLl(i);
        } else {
            ChangeIds(i);
        }
    }

    // The group's first view is not made in a capture.
    void MakeViews() {
        RefRun* run = &handles_[0].run;
        run->by_rank = run->as_view = true;
        ref_dispatch(run);
        run->by_rank = run->as_view = false;
    }

    bool MayStage() {
        unsigned staged = 0;
        for (const Handle& handle : handles_) staged += handle.staged ? 1 : 0;
        return staged < 2 && course_.OneIn(3);
    }

    void DispatchLl(size_t i) {
        Handle& handle = handles_[i];
        Check(handle);
        MaybeNewFormat(i);
        const bool stage = MayStage();
        handle.run.by_rank = course_.OneIn(3);
        course_.Note(stage ? "send dispatch" : "dispatch", i);
        if (handle.run.by_rank) course_.Note("rank-major", i);
        // The same on every rank; not drawn, so that a seed's course stays as it is.
        handle.run.as_view = views_++ % 3 != 0;
        Launch(i, true, stage ? kRefStaged : kRefWhole);
        handle.dispatched = true;
    }

    void CombineLl(size_t i) {
        Handle& handle = handles_[i];
        if (handle.unchecked_combine) Check(handle);
        const bool stage = MayStage();
        course_.Note(stage ? "send combine" : "combine", i);
        if (config_.chooser != nullptr) ChooseSums(i);
        Launch(i, false, stage ? kRefStaged : kRefWhole);
    }

    void ChooseSums(size_t i) {
        const unsigned top_k = handles_[i].run.shape.top_k;
        const unsigned variant = course_.Shared(3);
        course_.Note("variant", variant);
        handles_[i].run.sums = config_.chooser->Sum(variant, top_k);
    }

    void CompleteRun(size_t i) {
        course_.Note("complete", i);
        EP_CHECK_NCCL(ncclEpComplete(handles_[i].run.handle, nullptr, env_.stream));
        ref_keep_view(&handles_[i].run, env_.stream);
    }

    void Complete(size_t i) {
        Handle& handle = handles_[i];
        CompleteRun(i);
        handle.staged = false;
        (handle.staged_is_dispatch ? handle.unchecked_dispatch : handle.unchecked_combine) = true;
    }

    void GiveUp(size_t i) {
        Handle& handle = handles_[i];
        course_.Note("destroy while staged", i);
        EP_CHECK_NCCL(ep_handle_destroy(&handle.run.handle));
        ep_sync(&env_);
    }

    void ChangeIds(size_t i) {
        Handle& handle = handles_[i];
        Check(handle);
        switch (course_.Shared(4)) {  // a combine may follow at once, except with the last
            case 0:
                course_.Note("mask", i);
                ref_run_mask(&handle.run, 1 + course_.Shared(4));
                return;
            case 1:
                course_.Note("permute", i);
                ref_run_change(&handle.run, static_cast<RefChange>(course_.Shared(kRefNumChanges)));
                return;
            default: break;
        }
        handle.dispatched = false;  // other experts need a dispatch before a combine
        Reroute(i, "reroute");
    }

    // ---- High throughput

    void StepHt(size_t i) {
        const unsigned kind = course_.Shared(5);
        if (kind > 2) return CombineHt(i);
        RefPass pass{};
        pass.cached = kind == 2;
        pass.no_tokens = !pass.cached && course_.OneIn(6);
        pass.no_routing = !pass.cached && course_.OneIn(6);
        pass.counter = course_.OneIn(pass.cached ? 3 : 2);
        pass.send_only = course_.OneIn(4);
        DispatchHt(i, pass);
    }

    void DispatchHt(size_t i, RefPass pass) {
        Handle& handle = handles_[i];
        if (handle.unchecked_dispatch) Check(handle);
        MaybeNewFormat(i);
        if (!pass.cached && course_.OneIn(5)) Reroute(i, "other ids");
        course_.Note(pass.cached ? "cached" : "forward", i);
        if (handle.run.format.meaning == kRefCast) pass.no_tokens = false;  // which it needs
        Launch(i, true, pass);
    }

    void CombineHt(size_t i) {
        if (handles_[i].unchecked_combine) Check(handles_[i]);
        const bool backward = course_.OneIn(2);
        course_.Note(backward ? "backward combine" : "combine", i);
        Launch(i, false, backward ? kRefBackward : kRefWhole);
    }

    const EpEnv& env_;
    const Config& config_;
    Course course_;
    std::vector<Handle> handles_;
    unsigned views_ = 0;  // rank-major dispatches, of which some leave their rows in a view
};

}  // namespace

std::string PlayAll(const EpEnv& env, ncclEpGroup_t group, const Config& config) {
    Play play(env, group, config);
    for (unsigned step = 0; step < config.steps; ++step) play.Step();
    return play.Finish();
}

}  // namespace test_random

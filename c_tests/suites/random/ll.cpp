// Random low-latency operations on one to three handles: blocking and staged, repeated, with ids
// that change in between, checked as late as the outputs allow.
#include <vector>

#include "reference/ll_run.h"
#include "suites/random/chooser.h"
#include "suites/random/play.h"

namespace test_random {
namespace {

struct Handle {
    LlRun run{};
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
        for (size_t i = 0; i < handles_.size(); ++i) {
            const HandlePlan& plan = config.handles[i];
            const RefShape shape = {config.group.num_experts, config.group.max_tokens, plan.top_k,
                                    plan.datatype, plan.hidden};
            LlRun* run = &handles_[i].run;
            *run = ll_run_open_with(&env, group, &shape, plan.style, plan.uneven, plan.seed);
            run->variation = static_cast<unsigned>(plan.seed);
            run->without_counter = plan.counter == kHtNoCounter;
        }
        if (config.graphs) MakeViews();
    }

    void Step() {
        const size_t i = course_.Shared(static_cast<unsigned>(handles_.size()));
        Handle& handle = handles_[i];
        course_.MaybeDelay();
        if (handle.staged) {
            Complete(i);
        } else if (!handle.dispatched || course_.OneIn(2)) {
            Dispatch(i);
        } else if (!course_.OneIn(4)) {
            Combine(i);
        } else {
            ChangeIds(i);
        }
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
            ll_run_close(&handle.run);
        }
        return course_.history();
    }

   private:
    // The group's first view is not made in a capture.
    void MakeViews() {
        LlRun* run = &handles_[0].run;
        run->by_rank = run->as_view = true;
        ll_dispatch(run);
        run->by_rank = run->as_view = false;
    }

    // Outputs must be checked before the next operation of the kind poisons them, and the expected
    // combine must be computed before the ids change.
    void Check(Handle& handle) {
        if (!handle.unchecked_dispatch && !handle.unchecked_combine) return;
        ep_sync(&env_);
        if (handle.unchecked_dispatch) ll_check_dispatch(&handle.run);
        if (handle.unchecked_combine) ll_check_combine(&handle.run);
        handle.unchecked_dispatch = false;
        handle.unchecked_combine = false;
    }

    bool MayStage() {
        unsigned staged = 0;
        for (const Handle& handle : handles_) staged += handle.staged ? 1 : 0;
        return staged < 2 && course_.OneIn(3);
    }

    void Dispatch(size_t i) {
        Handle& handle = handles_[i];
        Check(handle);
        RefFormat format;
        if (course_.NewFormat(config_, i, &format)) ll_run_set_format(&handle.run, &format);
        const bool stage = MayStage();
        handle.run.by_rank = course_.OneIn(3);
        course_.Note(stage ? "send dispatch" : "dispatch", i);
        if (handle.run.by_rank) course_.Note("rank-major", i);
        // The same on every rank; no die, so that the courses of seeds stay.
        handle.run.as_view = views_++ % 3 != 0;
        ll_prepare_dispatch(&handle.run);
        course_.MaybeDelay();
        course_.Enqueue([&] {
            EP_CHECK_NCCL(ll_launch_dispatch(&handle.run, env_.stream, stage));
            if (stage && config_.graphs) CompleteRun(i);
        });
        handle.dispatched = true;
        handle.staged = stage && !config_.graphs;  // a graph completes what it begins
        handle.staged_is_dispatch = true;
        handle.unchecked_dispatch = !handle.staged;
    }

    void Combine(size_t i) {
        Handle& handle = handles_[i];
        if (handle.unchecked_combine) Check(handle);
        const bool stage = MayStage();
        course_.Note(stage ? "send combine" : "combine", i);
        if (config_.chooser != nullptr) ChooseSums(i);
        ll_prepare_combine(&handle.run);
        course_.MaybeDelay();
        course_.Enqueue([&] {
            EP_CHECK_NCCL(ll_launch_combine(&handle.run, env_.stream, stage));
            if (stage && config_.graphs) CompleteRun(i);
        });
        handle.staged = stage && !config_.graphs;  // a graph completes what it begins
        handle.staged_is_dispatch = false;
        handle.unchecked_combine = !handle.staged;
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
        ll_keep_view(&handles_[i].run, env_.stream);
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
        EP_CHECK_NCCL(ncclEpHandleDestroy(handle.run.handle));
        handle.run.handle = nullptr;
        ep_sync(&env_);
    }

    void ChangeIds(size_t i) {
        Handle& handle = handles_[i];
        Check(handle);
        switch (course_.Shared(4)) {  // a combine may follow at once, except with the last
            case 0:
                course_.Note("mask", i);
                ll_run_mask(&handle.run, 1 + course_.Shared(4));
                return;
            case 1:
                course_.Note("permute", i);
                ll_run_change(&handle.run, static_cast<RefChange>(course_.Shared(kRefNumChanges)));
                return;
            default: break;
        }
        course_.Note("reroute", i);
        handle.dispatched = false;  // other experts need a dispatch before a combine
        const RefRouting* old = handle.run.now;
        const auto style = static_cast<RefStyle>(course_.Shared(kRefNumStyles));
        ll_run_reroute(&handle.run, ref_routing_new(old->num_ranks, old->num_experts, old->top_k,
                                                    old->num_tokens, style, course_.SharedSeed()));
    }

    const EpEnv& env_;
    const Config& config_;
    Course course_;
    std::vector<Handle> handles_;
    unsigned views_ = 0;  // rank-major dispatches, of which some leave their rows in a view
};

}  // namespace

std::string PlayLowLatency(const EpEnv& env, ncclEpGroup_t group, const Config& config) {
    Play play(env, group, config);
    for (unsigned step = 0; step < config.steps; ++step) play.Step();
    return play.Finish();
}

}  // namespace test_random

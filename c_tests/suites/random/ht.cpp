// Random high-throughput operations on one to three handles: forward, cached and backward, with and
// without optional tensors, checked as late as the outputs allow.
#include <vector>

#include "reference/ht_run.h"
#include "suites/random/play.h"

namespace test_random {
namespace {

struct Handle {
    HtRun run{};
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
            const HtOpening opening = {plan.rows, plan.counter, plan.seed};
            HtRun* run = &handles_[i].run;
            course_.MaybeDelay();
            *run = ht_run_open_with(&env, group, &shape, plan.style, plan.uneven, opening);
            run->variation = static_cast<unsigned>(plan.seed);
        }
    }

    void Step() {
        const size_t i = course_.Shared(static_cast<unsigned>(handles_.size()));
        course_.MaybeDelay();
        switch (course_.Shared(5)) {
            case 0:
            case 1: Dispatch(i, Forward()); break;
            case 2: Dispatch(i, TokensOnly()); break;
            default: Combine(i); break;
        }
        if (course_.OneIn(3)) Check(handles_[i]);
    }

    std::string Finish() {
        for (Handle& handle : handles_) {
            Check(handle);
            ht_run_close(&handle.run);
        }
        return course_.history();
    }

   private:
    void Check(Handle& handle) {
        if (!handle.unchecked_dispatch && !handle.unchecked_combine) return;
        ep_sync(&env_);
        if (handle.unchecked_dispatch) ht_check_dispatch(&handle.run);
        if (handle.unchecked_combine) ht_check_combine(&handle.run);
        handle.unchecked_dispatch = false;
        handle.unchecked_combine = false;
    }

    HtPass Forward() {
        HtPass pass{};
        pass.forward = true;
        pass.no_tokens = course_.OneIn(6);
        pass.no_routing = course_.OneIn(6);
        pass.counter = course_.OneIn(2);
        pass.send_only = course_.OneIn(4);
        return pass;
    }

    HtPass TokensOnly() {
        HtPass pass{};
        pass.counter = course_.OneIn(3);
        pass.send_only = course_.OneIn(4);
        return pass;
    }

    void Dispatch(size_t i, HtPass pass) {
        Handle& handle = handles_[i];
        if (handle.unchecked_dispatch) Check(handle);
        RefFormat format;
        if (course_.NewFormat(config_, i, &format)) ht_run_set_format(&handle.run, &format);
        if (pass.forward && course_.OneIn(5)) GiveOtherIds(i);
        course_.Note(pass.forward ? "forward" : "cached", i);
        if (handle.run.format.meaning == kRefCast) pass.no_tokens = false;  // which it needs
        ht_prepare_dispatch(&handle.run);
        course_.MaybeDelay();
        course_.Enqueue([&] { EP_CHECK_NCCL(ht_launch_dispatch(&handle.run, pass, env_.stream)); });
        handle.unchecked_dispatch = true;
    }

    void GiveOtherIds(size_t i) {
        course_.Note("other ids", i);
        const RefRouting* own = handles_[i].run.routing;
        const auto style = static_cast<RefStyle>(course_.Shared(kRefNumStyles));
        ht_run_give(&handles_[i].run, ref_routing_new(own->num_ranks, own->num_experts, own->top_k, own->num_tokens,
                                                      style, course_.SharedSeed()));
    }

    void Combine(size_t i) {
        Handle& handle = handles_[i];
        if (handle.unchecked_combine) Check(handle);
        const bool backward = course_.OneIn(2);
        course_.Note(backward ? "backward combine" : "combine", i);
        ht_prepare_combine(&handle.run);
        course_.MaybeDelay();
        course_.Enqueue([&] { EP_CHECK_NCCL(ht_launch_combine(&handle.run, backward, env_.stream)); });
        handle.unchecked_combine = true;
    }

    const EpEnv& env_;
    const Config& config_;
    Course course_;
    std::vector<Handle> handles_;
};

}  // namespace

std::string PlayHighThroughput(const EpEnv& env, ncclEpGroup_t group, const Config& config) {
    Play play(env, group, config);
    for (unsigned step = 0; step < config.steps; ++step) play.Step();
    return play.Finish();
}

}  // namespace test_random

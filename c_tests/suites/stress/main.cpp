// Thousands of low-latency operations of two groups with several handles each, back to back:
// blocking and staged ones in random order, random sizes, and ranks that are late at random.
//
//   test_stress [--ops N] [--every N] [--seed N]
//
// --ops operations in all (400), compared after every --every (40). The seed (1) determines all.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "harness/dice.hpp"
#include "harness/options.hpp"
#include "reference/run.h"

namespace test_stress {
namespace {

constexpr unsigned kHandles = 3, kMostPending = 2;

// The operation that is pending on a handle.
enum class Operation { kNothing, kDispatch, kCombine };

struct Group {
    ncclEpGroup_t group;
    RefShape shape;
    unsigned num_pending = 0;
};

struct Handle {
    Group* group;
    RefRun run;
    Operation pending = Operation::kNothing;  // staged, and not completed yet
    bool combined = false;                    // in this batch
};

size_t Guarded(const RefBuffer& buffer) { return buffer.bytes + 2 * kRefGuardBytes; }

// Copies of the outputs of all operations of a batch, in device memory: the buffers with their guard zones.
class History {
   public:
    History(const std::vector<Handle>& handles, unsigned most) : most_(most) {
        size_t largest = 0;
        for (const Handle& handle : handles) {
            const RefRun& run = handle.run;
            largest = std::max({largest, Guarded(run.tokens_out) + Guarded(run.counter), Guarded(run.combined)});
        }
        memory_ = static_cast<unsigned char*>(ep_device_alloc(most * largest));
    }

    void Take(const Handle& handle, Operation operation, cudaStream_t stream) {
        EP_REQUIRE(items_.size() < most_);
        items_.push_back({&handle, operation, memory_ + used_});
        if (operation == Operation::kDispatch) {
            Move(handle.run.tokens_out, stream);
            Move(handle.run.counter, stream);
        } else {
            Move(handle.run.combined, stream);
        }
    }

    void CheckAndFree() {
        for (const Item& item : items_) {
            RefRun seen = item.handle->run;  // its state then: the outputs are those of the copy
            if (item.operation == Operation::kDispatch) {
                seen.tokens_out.base = item.copy;
                seen.counter.base = item.copy + Guarded(seen.tokens_out);
                ref_check_dispatch(&seen);
            } else {
                seen.combined.base = item.copy;
                ref_check_combine(&seen);
            }
        }
        ep_device_free(memory_);
    }

   private:
    struct Item {
        const Handle* handle;
        Operation operation;
        unsigned char* copy;
    };

    // Leaves poison behind, in the order of the stream.
    void Move(const RefBuffer& buffer, cudaStream_t stream) {
        const size_t bytes = Guarded(buffer);
        EP_REQUIRE_CUDA(cudaMemcpyAsync(memory_ + used_, buffer.base, bytes, cudaMemcpyDeviceToDevice, stream));
        EP_REQUIRE_CUDA(cudaMemsetAsync(buffer.base, kRefPoison, bytes, stream));
        used_ += bytes;
    }

    size_t most_;
    std::vector<Item> items_;
    unsigned char* memory_;
    size_t used_ = 0;
};

// Two groups and their handles. `plan` draws the same numbers on every rank, `delays` different ones.
class Stress {
   public:
    Stress(const EpEnv& env, uint64_t* plan, uint64_t* delays) : env_(env), plan_(plan), delays_(delays) {
        for (Group& group : groups_) {
            group.shape = RandomShape();
            group.group = ref_group_new(&env, NCCL_EP_ALGO_LOW_LATENCY, &group.shape);
            for (unsigned i = 0; i < kHandles; ++i) {
                const auto style = static_cast<RefStyle>(Plan(kRefNumStyles));
                const bool uneven = Plan(2) == 0;
                handles_.push_back({&group, ref_run_open_with(&env, group.group, &group.shape, style, uneven,
                                                              ref_ll(ep_random(plan_)))});
            }
        }
    }

    void Close() {
        for (Handle& handle : handles_) ref_run_close(&handle.run);
        for (Group& group : groups_) EP_CHECK_NCCL(ncclEpGroupDestroy(group.group, env_.stream));
    }

    // Gives all handles fresh data, launches at least `num_ops` operations back to back, then compares. With `all` the
    // output of every single operation is copied on the stream and compared, otherwise the last ones are. All handles
    // have different data, so a stale row of another operation in the same buffer shows. Returns the number of
    // operations.
    unsigned Batch(unsigned num_ops, bool all) {
        for (Handle& handle : handles_) Renew(handle);
        if (all) history_.emplace(handles_, num_ops + kMostPending * static_cast<unsigned>(groups_.size()));
        for (unsigned i = 0; i < num_ops; ++i) {
            const uint64_t group = Plan(groups_.size());
            Handle& handle = handles_[group * kHandles + Plan(kHandles)];
            Delay();
            handle.pending != Operation::kNothing ? Complete(handle) : Next(handle);
        }
        for (Handle& handle : handles_) {
            if (handle.pending != Operation::kNothing) Complete(handle);
        }
        if (all) history_->CheckAndFree();
        history_.reset();
        for (const Handle& handle : handles_) {
            if (!all) CheckLast(handle);
        }
        for (const Group& group : groups_) EP_CHECK_NCCL(ep_group_state(group.group));
        return num_ops + static_cast<unsigned>(handles_.size());
    }

   private:
    uint64_t Plan(uint64_t bound) { return ep_random_below(plan_, bound); }
    unsigned FromOneTo(unsigned most) { return 1 + static_cast<unsigned>(Plan(most)); }

    RefShape RandomShape() {
        constexpr unsigned kMaxTokens = 24, kMaxTopK = 6, kMaxLocalExperts = 3, kMaxRowUnits = 32, kRowUnit = 16;
        static const ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32};
        RefShape shape{};
        shape.num_experts = FromOneTo(kMaxLocalExperts) * static_cast<unsigned>(env_.size);
        shape.max_tokens = FromOneTo(kMaxTokens);
        shape.top_k = FromOneTo(kMaxTopK);
        shape.datatype = kTypes[Plan(3)];
        shape.hidden = kRowUnit * FromOneTo(kMaxRowUnits) / static_cast<unsigned>(ep_datatype_size(shape.datatype));
        return shape;
    }

    // Each rank now and then, at different times.
    void Delay() {
        constexpr unsigned kShortUs = 300, kLongUs = 20000, kShortEvery = 16, kLongEvery = 600;
        if (ep_random_below(delays_, kLongEvery) == 0) usleep(kLongUs);
        if (ep_random_below(delays_, kShortEvery) == 0) {
            usleep(static_cast<useconds_t>(ep_random_below(delays_, kShortUs)));
        }
    }

    // New data, sometimes with a new routing; every handle has dispatched once afterwards.
    void Renew(Handle& handle) {
        RefRun* run = &handle.run;
        const RefShape& shape = handle.group->shape;
        if (Plan(2) == 0) {
            const auto style = static_cast<RefStyle>(Plan(kRefNumStyles));
            ref_run_give(run, ref_routing_new(static_cast<unsigned>(env_.size), shape.num_experts, shape.top_k,
                                              run->now->num_tokens, style, ep_random(plan_)));
        }
        ref_prepare_dispatch(run);
        EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, env_.stream));
        ref_prepare_combine(run);
        handle.combined = false;
    }

    void Done(Handle& handle, Operation operation) {
        if (operation == Operation::kCombine) handle.combined = true;
        if (history_) history_->Take(handle, operation, env_.stream);
    }

    void Complete(Handle& handle) {
        EP_CHECK_NCCL(ncclEpComplete(handle.run.handle, nullptr, env_.stream));
        Done(handle, std::exchange(handle.pending, Operation::kNothing));
        --handle.group->num_pending;
    }

    void Next(Handle& handle) {
        const bool dispatch = Plan(2) == 0;
        const bool staged = Plan(2) == 0 && handle.group->num_pending < kMostPending;
        EP_CHECK_NCCL((dispatch ? ref_launch_dispatch : ref_launch_combine)(
            &handle.run, staged ? kRefStaged : kRefWhole, env_.stream));
        const Operation operation = dispatch ? Operation::kDispatch : Operation::kCombine;
        if (!staged) return Done(handle, operation);
        handle.pending = operation;
        ++handle.group->num_pending;
    }

    static void CheckLast(const Handle& handle) {
        RefRun seen = handle.run;
        ref_check_dispatch(&seen);
        if (handle.combined) ref_check_combine(&seen);
    }

    const EpEnv& env_;
    uint64_t* plan_;
    uint64_t* delays_;
    std::array<Group, 2> groups_;
    std::vector<Handle> handles_;
    std::optional<History> history_;  // of a batch whose operations are all compared
};

struct Options {
    unsigned num_ops = 400, every = 40, seed = 1;
};

void Run(const EpEnv& env, const Options& options) {
    constexpr unsigned kBatchesPerRound = 6;
    uint64_t plan = options.seed;
    uint64_t delays = ep_mix(options.seed, static_cast<uint64_t>(env.rank), 1);
    unsigned done = 0;
    while (done < options.num_ops) {
        Stress stress(env, &plan, &delays);
        for (unsigned i = 0; i < kBatchesPerRound && done < options.num_ops; ++i) {
            done += stress.Batch(options.every, i % 2 == 0);
        }
        stress.Close();
    }
    if (env.rank == 0) std::printf("%u operations\n", done);
}

}  // namespace
}  // namespace test_stress

int main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    test_stress::Options options;
    std::string error =
        ep::ParseOptions(argc, argv,
                         {ep::Number(0, "ops", 0, &options.num_ops), ep::Number(0, "every", 1, &options.every),
                          ep::Number(0, "seed", 0, &options.seed)});
    if (error.empty() && options.every > 100000) error = "--every: at most 100000";
    if (!error.empty()) {
        if (env.rank == 0)
            std::fprintf(stderr, "%s\nusage: test_stress [--ops N] [--every N] [--seed N]\n", error.c_str());
        ep_release(&env);
        return 2;
    }
    test_stress::Run(env, options);
    return ep_finish(&env);
}

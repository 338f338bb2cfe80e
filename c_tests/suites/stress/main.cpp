// Thousands of operations of two groups with several handles each, back to back, in both modes: blocking and staged
// ones in random order, random sizes, and ranks that are late at random.
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
    bool ht;
    RefShape shape;
    unsigned num_pending = 0;
};

struct Handle {
    Group* group;
    RefRun run;
    Operation pending = Operation::kNothing;  // staged, and not completed yet
    bool combined = false;                    // in this batch
};

std::vector<RefBuffer*> OutputsOf(RefRun* run, Operation operation) {
    if (operation == Operation::kCombine) return {&run->combined, &run->gradients_out};
    return {&run->tokens_out, &run->counter, &run->ids_out, &run->weights_out};
}

// With guard zones.
size_t BytesOf(const RefBuffer& buffer) { return buffer.before + buffer.bytes + buffer.behind; }

// Copies of the outputs of all operations of a batch, in device memory.
class History {
   public:
    History(std::vector<Handle>& handles, size_t most) {
        size_t largest = 0;
        for (Handle& handle : handles) {
            for (const Operation operation : {Operation::kDispatch, Operation::kCombine}) {
                size_t bytes = 0;
                for (const RefBuffer* buffer : OutputsOf(&handle.run, operation)) bytes += BytesOf(*buffer);
                largest = std::max(largest, bytes);
            }
        }
        memory_ = static_cast<unsigned char*>(ep_device_alloc(most * largest));
        end_ = memory_ + most * largest;
        next_ = memory_;
    }

    // Leaves poison behind, in the order of the stream.
    void Take(RefRun* run, Operation operation, cudaStream_t stream) {
        items_.push_back({run, operation, run->pass, run->backward, next_});
        for (const RefBuffer* buffer : OutputsOf(run, operation)) {
            const size_t bytes = BytesOf(*buffer);
            EP_REQUIRE(bytes <= static_cast<size_t>(end_ - next_));
            if (bytes == 0) continue;
            EP_REQUIRE_CUDA(cudaMemcpyAsync(next_, buffer->base, bytes, cudaMemcpyDeviceToDevice, stream));
            EP_REQUIRE_CUDA(cudaMemsetAsync(buffer->base, kRefPoison, bytes, stream));
            next_ += bytes;
        }
    }

    void CheckAndFree() {
        for (const Item& item : items_) {
            RefRun seen = *item.run;  // but for this its state is the same all the time
            seen.pass = item.pass;
            seen.backward = item.backward;
            unsigned char* copy = item.copies;
            for (RefBuffer* buffer : OutputsOf(&seen, item.operation)) {
                buffer->base = copy;
                copy += BytesOf(*buffer);
            }
            (item.operation == Operation::kDispatch ? ref_check_dispatch : ref_check_combine)(&seen);
        }
        ep_device_free(memory_);
    }

   private:
    struct Item {
        RefRun* run;
        Operation operation;
        RefPass pass;
        bool backward;
        unsigned char* copies;
    };

    std::vector<Item> items_;
    unsigned char *memory_, *end_, *next_;
};

// Two groups and their handles. `plan` draws the same numbers on every rank, `delays` different ones.
class Stress {
   public:
    Stress(const EpEnv& env, uint64_t* plan, uint64_t* delays) : env_(env), plan_(plan), delays_(delays) {
        const bool has_ht = ep_has_high_throughput(&env);
        for (Group& group : groups_) {
            group.ht = has_ht && Plan(2) == 0;
            group.shape = RandomShape(group.ht);
            const auto algorithm = group.ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
            group.group = ref_group_new(&env, algorithm, &group.shape);
            for (unsigned i = 0; i < kHandles; ++i) {
                const auto style = static_cast<RefStyle>(Plan(kRefNumStyles));
                const bool uneven = Plan(2) == 0;
                const auto rows = static_cast<HtRows>(Plan(3));
                const RefOpening opening = ref_opening(group.ht, rows, kHtNoCounter, ep_random(plan_));
                handles_.push_back(
                    {&group, ref_run_open_with(&env, group.group, &group.shape, style, uneven, opening)});
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
        if (all) history_.emplace(handles_, num_ops + handles_.size() + kMostPending * groups_.size());
        for (Handle& handle : handles_) Renew(handle);
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
        for (Handle& handle : handles_) {
            if (!all) ref_check_dispatch(&handle.run);
            if (!all && handle.combined) ref_check_combine(&handle.run);
        }
        for (const Group& group : groups_) EP_CHECK_NCCL(ep_group_state(group.group));
        return num_ops + static_cast<unsigned>(handles_.size());
    }

   private:
    uint64_t Plan(uint64_t bound) { return ep_random_below(plan_, bound); }
    unsigned FromOneTo(unsigned most) { return 1 + static_cast<unsigned>(Plan(most)); }

    RefShape RandomShape(bool ht) {
        constexpr unsigned kMaxTokens = 24, kMaxTopK = 6, kMaxLocalExperts = 3, kMaxRowUnits = 32, kRowUnit = 16;
        static const ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32};
        RefShape shape{};
        shape.num_experts = FromOneTo(kMaxLocalExperts) * static_cast<unsigned>(env_.size);
        shape.max_tokens = ht && Plan(3) == 0 ? NCCL_EP_AUTO : FromOneTo(kMaxTokens);
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

    // New data, sometimes with other ids; every handle has dispatched once afterwards.
    void Renew(Handle& handle) {
        RefRun* run = &handle.run;
        if (Plan(2) == 0) {
            const auto style = static_cast<RefStyle>(Plan(kRefNumStyles));
            ref_run_draw(run, style, ep_random(plan_));
        }
        ref_prepare_dispatch(run);
        EP_CHECK_NCCL(ref_launch_dispatch(run, kRefCounted, env_.stream));
        Done(handle, Operation::kDispatch);
        ref_prepare_combine(run);
        handle.combined = false;
    }

    void Done(Handle& handle, Operation operation) {
        if (operation == Operation::kCombine) handle.combined = true;
        if (history_) history_->Take(&handle.run, operation, env_.stream);
    }

    void Complete(Handle& handle) {
        EP_CHECK_NCCL(ncclEpComplete(handle.run.handle, nullptr, env_.stream));
        Done(handle, std::exchange(handle.pending, Operation::kNothing));
        --handle.group->num_pending;
    }

    // Where outputs stay, each operation writes all of its kind.
    RefPass PassOf(bool dispatch) {
        const bool all = !history_ || Plan(2) == 0;
        if (dispatch) return all ? kRefCounted : kRefCached;
        return all ? kRefBackward : kRefWhole;
    }

    void Next(Handle& handle) {
        const bool dispatch = Plan(2) == 0;
        const bool staged = Plan(2) == 0 && !handle.group->ht && handle.group->num_pending < kMostPending;
        EP_CHECK_NCCL((dispatch ? ref_launch_dispatch : ref_launch_combine)(
            &handle.run, staged ? kRefStaged : PassOf(dispatch), env_.stream));
        const Operation operation = dispatch ? Operation::kDispatch : Operation::kCombine;
        if (!staged) return Done(handle, operation);
        handle.pending = operation;
        ++handle.group->num_pending;
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
    const std::string error =
        ep::ParseOptions(argc, argv,
                         {ep::Number(0, "ops", 0, &options.num_ops), ep::Number(0, "every", 1, &options.every),
                          ep::Number(0, "seed", 0, &options.seed)});
    if (!error.empty()) {
        if (env.rank == 0)
            std::fprintf(stderr, "%s\nusage: test_stress [--ops N] [--every N] [--seed N]\n", error.c_str());
        ep_release(&env);
        return 2;
    }
    test_stress::Run(env, options);
    return ep_finish(&env);
}

// Thousands of low-latency operations of two groups with several handles each, back to back:
// blocking and staged ones in random order, random sizes, and ranks that are late at random.
//
//   test_stress [--ops N] [--every N] [--seed N]
//
// --ops operations in all (400), compared after every --every (40). The seed (1) determines all.
#include "suites/stress/stress.h"

enum { kDefaultOps = 400, kDefaultEvery = 40, kBatchesPerRound = 6 };
enum { kMaxTokens = 24, kMaxTopK = 6, kMaxLocalExperts = 3, kMaxRowUnits = 32, kRowUnit = 16 };

typedef struct {
    unsigned num_ops, every, seed;
} Options;

static unsigned from_one_to(Stress* stress, unsigned most) {
    return 1 + (unsigned)ep_random_below(&stress->plan, most);
}

static RefShape random_shape(Stress* stress) {
    static const ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32};
    RefShape shape;
    shape.num_experts = from_one_to(stress, kMaxLocalExperts) * (unsigned)stress->env->size;
    shape.max_tokens = from_one_to(stress, kMaxTokens);
    shape.top_k = from_one_to(stress, kMaxTopK);
    shape.datatype = kTypes[ep_random_below(&stress->plan, 3)];
    shape.hidden = kRowUnit * from_one_to(stress, kMaxRowUnits) / (unsigned)ep_datatype_size(shape.datatype);
    return shape;
}

static void open_group(Stress* stress, StressGroup* group) {
    memset(group, 0, sizeof(*group));
    group->shape = random_shape(stress);
    group->group = ref_group_new(stress->env, NCCL_EP_ALGO_LOW_LATENCY, &group->shape);
    for (unsigned h = 0; h < kHandles; ++h) {
        const RefStyle style = (RefStyle)ep_random_below(&stress->plan, kRefNumStyles);
        const bool uneven = ep_random_below(&stress->plan, 2) == 0;
        group->handles[h].run = ref_run_open_with(stress->env, group->group, &group->shape, style, uneven,
                                                  ref_ll(ep_random(&stress->plan)));
    }
}

static void close_group(Stress* stress, StressGroup* group) {
    for (unsigned h = 0; h < kHandles; ++h) ref_run_close(&group->handles[h].run);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group->group, stress->env->stream));
}

static void run(const EpEnv* env, const Options* options) {
    Stress stress;
    memset(&stress, 0, sizeof(stress));
    stress.env = env;
    stress.plan = options->seed;
    stress.delays = ep_mix(options->seed, (uint64_t)env->rank, 1);
    uint64_t done = 0;
    while (done < options->num_ops) {
        for (unsigned g = 0; g < kGroups; ++g) open_group(&stress, &stress.groups[g]);
        for (unsigned i = 0; i < kBatchesPerRound && done < options->num_ops; ++i) {
            done += stress_batch(&stress, options->every, i % 2 == 0);
        }
        for (unsigned g = 0; g < kGroups; ++g) close_group(&stress, &stress.groups[g]);
    }
    if (env->rank == 0) printf("%llu operations\n", (unsigned long long)done);
}

int main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    Options options = {kDefaultOps, kDefaultEvery, 1};
    const EpOption table[] = {
        {"--ops", &options.num_ops, NULL}, {"--every", &options.every, NULL}, {"--seed", &options.seed, NULL}};
    const bool good = ep_read_options(argc, argv, table, COUNT(table), NULL);
    if (!good || options.every == 0 || options.every > 100000) {
        if (env.rank == 0) fprintf(stderr, "usage: test_stress [--ops N] [--every N] [--seed N]\n");
        ep_release(&env);
        return 2;
    }
    run(&env, &options);
    return ep_finish(&env);
}

// Draws configurations: mostly small ones, which show mistakes as well and of which more fit into a
// minute, and some that are large in one dimension.
#include "suites/random/config.h"

#include <algorithm>
#include <sstream>

#include "harness/dice.hpp"

namespace test_random {
namespace {

using ep::Dice;

const char* Name(RefStyle style) {
    static const char* const kNames[] = {"distinct", "repeating",  "messy",  "skewed",
                                         "one rank", "one expert", "nowhere"};
    return kNames[style];
}

const char* Name(ncclDataType_t datatype) {
    return datatype == ncclBfloat16 ? "bf16" : datatype == ncclFloat16 ? "f16" : "f32";
}

RefStyle DrawStyle(Dice& dice) {
    // Ordinary kinds are more frequent than extreme ones.
    return static_cast<RefStyle>(dice.OneIn(3) ? dice.Below(kRefNumStyles) : dice.Below(kRefSkewed + 1));
}

HandlePlan DrawHandle(const GroupPlan& group, Dice& dice) {
    static const ncclDataType_t kDatatypes[] = {ncclBfloat16, ncclBfloat16, ncclFloat16, ncclFloat32};
    HandlePlan plan{};
    plan.style = DrawStyle(dice);
    plan.uneven = !dice.OneIn(4);
    plan.top_k = dice.OneIn(8) ? dice.Between(1, 32) : dice.Between(1, 9);
    plan.datatype = kDatatypes[dice.Below(4)];
    const unsigned pieces = dice.OneIn(2) ? group.row_bytes / 16 : dice.Between(1, group.row_bytes / 16);
    plan.hidden = pieces * 16 / static_cast<unsigned>(ep_datatype_size(plan.datatype));
    plan.rows = static_cast<HtRows>(dice.Below(3));
    plan.counter = static_cast<HtCounter>(dice.Below(3));
    plan.seed = dice.Seed();
    return plan;
}

}  // namespace

GroupPlan DrawGroup(uint64_t seed, unsigned index, unsigned num_ranks) {
    const unsigned number = index / kConfigsPerGroup;
    Dice dice(ep_mix(seed, number, 1));
    GroupPlan group{};
    group.low_latency = number % 2 == 0;
    unsigned local_experts = dice.Between(1, 4);
    group.max_tokens = dice.Between(1, 16);
    group.row_bytes = 16 * dice.Between(1, 8);
    switch (dice.Below(8)) {
        case 0:  // many tokens
            group.max_tokens = dice.Between(64, 200);
            group.row_bytes = 16 * dice.Between(1, 2);
            break;
        case 1:  // long rows
            group.max_tokens = dice.Between(1, 4);
            group.row_bytes = 16 * dice.Between(100, 900);
            local_experts = 1;
            break;
        case 2:  // many experts
            local_experts = dice.Between(5, 40);
            group.max_tokens = dice.Between(1, 8);
            break;
        case 3:  // rows of several blocks of a cast
            group.max_tokens = dice.Between(1, 6);
            group.row_bytes = 16 * dice.Between(38, 75);
            break;
        default: break;
    }
    group.num_experts = local_experts * num_ranks;
    if (!group.low_latency && dice.OneIn(5)) group.max_tokens = NCCL_EP_AUTO;
    return group;
}

Config Draw(uint64_t seed, unsigned index, unsigned num_ranks) {
    Dice dice(ep_mix(seed, index, 2));
    Config config{};
    config.seed = seed;
    config.index = index;
    config.group = DrawGroup(seed, index, num_ranks);
    const unsigned num_handles = dice.OneIn(2) ? 1 : dice.Between(2, 3);
    for (unsigned i = 0; i < num_handles; ++i) config.handles.push_back(DrawHandle(config.group, dice));
    config.steps = dice.Between(2, 6);
    config.delays = dice.OneIn(4);
    return config;
}

std::string Describe(const Config& config) {
    std::ostringstream text;
    text << "configuration " << config.index << " of seed " << config.seed << ": "
         << (config.group.low_latency ? "LL" : "HT") << ", " << config.group.num_experts << " experts, at most "
         << config.group.max_tokens << " tokens of " << config.group.row_bytes << " bytes, " << config.steps << " steps"
         << (config.delays ? ", delays" : "");
    for (const HandlePlan& handle : config.handles) {
        text << "\n  handle: ids " << Name(handle.style) << ", tokens " << (handle.uneven ? "uneven" : "full")
             << ", top-k " << handle.top_k << ", " << handle.hidden << " x " << Name(handle.datatype);
        if (!config.group.low_latency) {
            text << ", rows kind " << handle.rows << ", counter kind " << handle.counter;
        }
        text << ", seed " << handle.seed;
    }
    return text.str();
}

}  // namespace test_random

// Groups: created, destroyed, and asked for their state.
#include <climits>

#include "suites/fuzz/player.h"

namespace test_fuzz {
namespace {

constexpr uintptr_t kSentinel = 0x5e571e15e57;
constexpr unsigned kNoChange = UINT_MAX;

template <typename T>
T Sentinel() {
    return reinterpret_cast<T>(kSentinel);
}

// Makes one change, which breaks a rule or differs from other ranks' values. Changes may be combined.
std::string Break(Dice& dice, unsigned num_ranks, bool may_differ, ncclEpGroupConfig_t* config) {
    static const unsigned kVersions[] = {0, 2, UINT_MAX};
    static const unsigned kSizes[] = {0, 8, 17, UINT_MAX};
    static const unsigned kAlgorithms[] = {2, 77, UINT_MAX};
    switch (dice.Below(may_differ ? 9 : 6)) {
        case 0: config->version = dice.Pick(kVersions); return "version";
        case 1:
            config->num_experts = num_ranks == 1 || dice.OneIn(2) ? 0 : config->num_experts + 1;
            return "num_experts";
        case 2: config->token_size_bytes = dice.Pick(kSizes); return "token_size_bytes";
        case 3: config->max_tokens_per_rank = UINT_MAX; return "max_tokens_per_rank";
        case 4: SetRaw(&config->algorithm, dice.Pick(kAlgorithms)); return "algorithm";
        case 5:
            config->algorithm = NCCL_EP_ALGO_LOW_LATENCY;
            config->max_tokens_per_rank = NCCL_EP_AUTO;
            return "automatic tokens in LL";
        case 6: config->num_experts = num_ranks * dice.Between(1, kMostLocalExperts); return "num_experts of its own";
        case 7: config->max_tokens_per_rank = dice.Between(1, kMostTokens); return "max_tokens_per_rank of its own";
        default:
            config->token_size_bytes = 16 * dice.Between(1, kMostRowBytes / 16);
            return "token_size_bytes of its own";
    }
}

ncclEpGroupConfig_t DrawConfig(Dice& dice, unsigned num_ranks, bool high_throughput) {
    const bool automatic = dice.OneIn(4) && high_throughput;
    ncclEpGroupConfig_t config = ep_group_config(
        high_throughput ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY,
        num_ranks * dice.Between(1, kMostLocalExperts), automatic ? NCCL_EP_AUTO : dice.Between(1, kMostTokens),
        16 * dice.Between(1, kMostRowBytes / 16));
    if (dice.OneIn(3)) config.rdma_buffer_size = dice.Seed();
    if (dice.OneIn(3)) config.num_qp_per_rank = static_cast<unsigned>(dice.Seed());
    if (dice.OneIn(3)) config.num_channels = dice.OneIn(4) ? UINT_MAX : dice.Below(200);
    return config;
}

std::string Describe(const ncclEpGroupConfig_t& config) {
    unsigned algorithm = 0;
    std::memcpy(&algorithm, &config.algorithm, sizeof(algorithm));
    return "algorithm " + std::to_string(algorithm) + ", experts " + std::to_string(config.num_experts) + ", tokens " +
           std::to_string(config.max_tokens_per_rank) + ", bytes " + std::to_string(config.token_size_bytes) +
           ", channels " + std::to_string(config.num_channels);
}

}  // namespace

int Player::LivingGroup(Dice& dice, bool low_latency, bool any_mode) const {
    const unsigned first = dice.Below(kGroups);
    for (unsigned i = 0; i < kGroups; ++i) {
        const unsigned index = (first + i) % kGroups;
        const Group& group = groups_[index];
        if (group.number == nullptr) continue;
        if (any_mode || group.low_latency == low_latency) return static_cast<int>(index);
    }
    return -1;
}

ncclEpGroup_t Player::AnyGroup(Dice& dice) const {
    const int index = LivingGroup(dice, false, true);
    if (index >= 0 && !dice.OneIn(6)) return groups_[static_cast<size_t>(index)].number;
    return static_cast<ncclEpGroup_t>(BadNumber(dice, true));
}

void Player::CreateGroup(Draw& draw) {
    size_t slot = 0;
    while (slot < kGroups && groups_[slot].number != nullptr) ++slot;
    if (slot == kGroups) return;
    const auto num_ranks = static_cast<unsigned>(seat_.size);
    // A round begins with a group of each mode.
    const bool high_throughput = draw.valid ? slot == 1 : draw.what.OneIn(2);
    ncclEpGroupConfig_t config = DrawConfig(draw.what, num_ranks, high_throughput && seat_.has_ht);
    const Allocators memory = AnyAllocators(draw.what, options_.threads > 1);
    ncclEpGroup_t number = Sentinel<ncclEpGroup_t>();
    ncclEpGroup_t* out = &number;
    const ncclEpGroupConfig_t* argument = &config;
    ncclComm_t comm = seat_.comm;
    std::string detail;
    const unsigned change = draw.valid || draw.how.OneIn(2) ? kNoChange : draw.how.Below(8);
    if (change == 0) out = nullptr;
    if (change == 1) argument = nullptr;
    // A rank without a communicator takes no part.
    if (change == 2 && !draw.together) comm = nullptr;
    if (change <= 2) detail = "NULL " + std::to_string(change) + ", ";
    if (change > 2 && change != kNoChange) detail = Break(draw.how, num_ranks, !options_.agree, &config) + ", ";
    const cudaStream_t stream = AnyStream(draw.how);
    Order(&groups_[slot], stream);
    const ncclResult_t result = referee_.Judge("ncclEpCreateGroup", detail + Describe(config), kArgument | kUsage, [&] {
        return ncclEpCreateGroup(out, comm, argument, stream, memory.alloc_fn, memory.free_fn);
    });
    Ordered(stream);
    if (!KeptOrWritten(result, number == Sentinel<ncclEpGroup_t>(), out != nullptr)) return;
    groups_[slot] = {number, config.algorithm == NCCL_EP_ALGO_LOW_LATENCY, config.num_experts / num_ranks,
                     config.max_tokens_per_rank, config.token_size_bytes};
}

void Player::DestroyGroup(Draw& draw) {
    const int index = LivingGroup(draw.what, false, true);
    if (index >= 0) DestroyGroupAt(static_cast<size_t>(index), AnyStream(draw.how));
}

void Player::DestroyGroupAt(size_t index, cudaStream_t stream) {
    Group& group = groups_[index];
    if (group.number == nullptr) return;
    Order(&group, stream);
    referee_.Judge("ncclEpGroupDestroy", "group in slot " + std::to_string(index), 0,
                   [&] { return ncclEpGroupDestroy(group.number, stream); });
    Ordered(stream);
    Bury(&dead_groups_, group.number);
    group = Group();
}

void Player::DestroyBadGroup(Draw& draw) {
    void* const number = BadNumber(draw.how, true);
    const ncclResult_t result = referee_.Judge("ncclEpGroupDestroy", "bad number", kArgument, [&] {
        return ncclEpGroupDestroy(static_cast<ncclEpGroup_t>(number), streams_[0]);
    });
    referee_.Check((result == ncclSuccess) == (number == nullptr), "refused unless NULL");
}

// Ranks need not agree on what is chosen here.
void Player::ChooseForGroup(Draw& draw) {
    static const unsigned kVariants[] = {NCCL_EP_VARIANT_AUTO,      NCCL_EP_VARIANT_AUTO,    NCCL_EP_VARIANT_HT_RING,
                                         NCCL_EP_VARIANT_HT_DIRECT, NCCL_EP_VARIANT_HT_PULL, 77};
    Dice& dice = draw.how;
    const auto number = [&](unsigned usual) { return dice.OneIn(16) ? ~0u : dice.Below(usual); };
    const ncclEpGroup_t group = AnyGroup(dice);
    const unsigned operation = dice.Below(6);
    ncclEpChoice_t choice = {sizeof(choice), kVariants[dice.Below(6)], number(4), number(4), 32 * number(8), 0};
    if (dice.OneIn(8)) choice.size = dice.Below(64);
    const bool clears = dice.OneIn(4);
    referee_.Judge("ncclEpSetChoice", "operation " + std::to_string(operation), kArgument,
                   [&] { return ncclEpSetChoice(group, operation, clears ? nullptr : &choice); });
}

void Player::AskGroup(Draw& draw) {
    if (draw.how.OneIn(2)) return ChooseForGroup(draw);
    const ncclResult_t kOther = ncclInProgress;
    const ncclEpGroup_t group = AnyGroup(draw.how);
    ncclResult_t state = kOther;
    ncclResult_t* out = draw.how.OneIn(8) ? nullptr : &state;
    const ncclResult_t result = referee_.Judge("ncclEpGetAsyncError", out == nullptr ? "NULL" : "", kArgument,
                                               [&] { return ncclEpGetAsyncError(group, out); });
    KeptOrWritten(result, state == kOther, out != nullptr);
}

void Player::CheckHealth() {
    if (!referee_.strict()) return;
    for (const Group& group : groups_) {
        if (group.number == nullptr) continue;
        ncclResult_t state = ncclInProgress;
        referee_.Judge("ncclEpGetAsyncError", "", 0, [&] { return ncclEpGetAsyncError(group.number, &state); });
        referee_.Check(state == ncclSuccess,
                       "the group has failed: " + std::to_string(state) + " " + ncclEpGetLastError());
    }
}

bool Player::KeptOrWritten(ncclResult_t result, bool kept, bool has_place) {
    const bool success = result == ncclSuccess;
    referee_.Check(success != kept, success ? "writes no result" : "writes though refused");
    referee_.Check(!success || has_place, "succeeds without a place for the result");
    return success && !kept;
}

}  // namespace test_fuzz

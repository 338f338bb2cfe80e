// Handles: created, destroyed, queried; their ids are changed in place.
#include <climits>

#include "suites/fuzz/player.h"

namespace test_fuzz {
namespace {

ncclEpHandle_t Sentinel() { return reinterpret_cast<ncclEpHandle_t>(uintptr_t{0x5e571e15e57}); }

void AddCounter(Dice& dice, const Group& group, const Memory& memory, Lists* lists) {
    const bool host = dice.OneIn(2);
    const Kind kind = host ? Kind{NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST, ncclInt32} : kCounts;
    lists->local.Add(kind, host ? memory.host_counter() : memory.At(kCounter), Rows::kAtLeast, {group.local_experts});
}

}  // namespace

int Player::AnyHandle(Dice& dice, Handle* facts) const {
    const unsigned first = dice.Below(kMostHandles);
    const bool bad = dice.OneIn(12);
    for (unsigned i = 0; i < kMostHandles; ++i) {
        const unsigned index = (first + i) % kMostHandles;
        if (handles_[index].number == nullptr) continue;
        *facts = handles_[index];
        if (!bad) return static_cast<int>(index);
        break;
    }
    facts->number = static_cast<ncclEpHandle_t>(BadNumber(dice, false));
    return -1;
}

// Draws a number of tokens for each rank. With 0 tokens NULL is a valid data pointer, so the flag whether some ranks,
// not all, may have none is equal on all ranks; addresses are not broken where it is set.
void Player::DrawTokens(Dice& dice, Handle* handle) const {
    const unsigned bound = handle->group.max_tokens;
    const unsigned most = bound == NCCL_EP_AUTO ? kMostTokens : bound;
    const unsigned style = dice.Below(8);
    Dice mine(ep_mix(dice.Seed(), static_cast<uint64_t>(seat_.rank), 1));
    handle->any_empty = style == 0;
    handle->even = style == 1 || style == 2 || style == 3;
    if (handle->any_empty) {
        handle->tokens = mine.Below(most + 1);
    } else if (handle->even) {
        handle->tokens = style == 1 ? 0 : most;
    } else {
        handle->tokens = mine.Between(1, most);
    }
}

void Player::CreateHandle(Draw& draw, bool high_throughput) {
    unsigned slot = 0;
    while (slot < kMostHandles && handles_[slot].number != nullptr) ++slot;
    if (slot == kMostHandles) return DestroyHandle(draw);
    const int index = LivingGroup(draw.what, !high_throughput, false);
    if (index < 0 && draw.together) return;
    Handle made;
    if (index >= 0) made.group = groups_[static_cast<size_t>(index)];
    ncclEpGroup_t group = made.group.number;
    const bool change = !draw.valid && draw.how.OneIn(3);
    if (index < 0 || (change && !draw.together && draw.how.OneIn(8))) {
        group = static_cast<ncclEpGroup_t>(BadNumber(draw.how, true));
    }
    DrawTokens(draw.what, &made);
    made.top_k = draw.how.OneIn(8) ? draw.how.Between(1, kMostTopK) : draw.how.Between(1, 4);
    DrawIds(slot, made.group, draw.how);
    Lists lists;
    lists.in.Add(kIds, memory_.IdsOf(slot), Rows::kAtMost, {made.tokens, made.top_k});
    if (high_throughput && draw.how.OneIn(2)) AddCounter(draw.how, made.group, memory_, &lists);
    std::string detail = "slot " + std::to_string(slot) + (high_throughput ? " HT" : " LL") + ", group " +
                         std::to_string(index) + ", tokens " + std::to_string(made.tokens) + ", top-k " +
                         std::to_string(made.top_k);
    if (change) {
        List& list = draw.how.OneIn(4) ? lists.local : lists.in;
        detail += ", " + list.Change(draw.how, made.any_empty);
    }
    lists.Remember();
    ncclEpHandle_t number = Sentinel();
    ncclEpHandle_t* out = change && draw.how.OneIn(16) ? nullptr : &number;
    const auto* config =
        static_cast<const ncclEpHandleConfig_t*>(change && draw.how.OneIn(16) ? WildPointer() : nullptr);
    const cudaStream_t stream = AnyStream(draw.how);
    const bool use_fp8 = draw.how.OneIn(4);
    const ncclNDTensor_t* ids = lists.in.first();
    Order(&groups_[index >= 0 ? static_cast<size_t>(index) : 0], stream);
    const ncclResult_t result = referee_.Judge("ncclEpCreateHandle", detail, kArgument | kUsage, [&] {
        return ncclEpCreateHandle(out, group, ids, lists.local.outputs(), lists.local.count(), config, stream, use_fp8);
    });
    Ordered(stream);
    referee_.Check(lists.AreAsRemembered(), "changes a descriptor");
    if (!KeptOrWritten(result, number == Sentinel(), out != nullptr)) return;
    made.number = number;
    made.top_k = ids->sizes[1];
    handles_[slot] = made;
}

void Player::DestroyHandle(Draw& draw) {
    Handle facts;
    const int index = AnyHandle(draw.how, &facts);
    if (index >= 0) return DestroyHandleAt(static_cast<size_t>(index));
    const ncclResult_t result = referee_.Judge("ncclEpHandleDestroy", "bad number", kArgument,
                                               [&] { return ncclEpHandleDestroy(facts.number); });
    referee_.Check((result == ncclSuccess) == (facts.number == nullptr), "refused unless NULL");
}

void Player::DestroyHandleAt(size_t index) {
    Handle& handle = handles_[index];
    if (handle.number == nullptr) return;
    referee_.Judge("ncclEpHandleDestroy", "slot " + std::to_string(index) + (handle.staged ? ", staged" : ""), 0,
                   [&] { return ncclEpHandleDestroy(handle.number); });
    Bury(&dead_handles_, handle.number);
    handle = Handle();
}

// Low latency reads the ids in every operation; a staged operation may still read them.
void Player::UpdateIds(Draw& draw) {
    Handle facts;
    const int index = AnyHandle(draw.what, &facts);
    if (index < 0 || !facts.group.low_latency || facts.staged) return;
    DrawIds(static_cast<unsigned>(index), facts.group, draw.how);
}

void Player::DrawIds(unsigned slot, const Group& group, Dice& dice) {
    Rest();  // an operation may be reading the current ids
    const uint64_t seed = ep_mix(dice.Seed(), static_cast<uint64_t>(seat_.rank), 2);
    const unsigned num_experts = group.local_experts * static_cast<unsigned>(seat_.size);
    // A rank that sends a low-latency expert more rows than its share may overfill it, and the group fails.
    const unsigned most = group.low_latency ? group.max_tokens : UINT_MAX;
    memory_.DrawIds(slot, num_experts, most, seed, streams_[1]);
}

void Player::AskHandle(Draw& draw) {
    constexpr unsigned kOther = 0x5e5e5e5e;
    Handle facts;
    AnyHandle(draw.how, &facts);
    unsigned rows = kOther;
    unsigned* out = draw.how.OneIn(8) ? nullptr : &rows;
    const ncclResult_t result = referee_.Judge("ncclEpHandleGetNumRecvTokens", "", kArgument | kUsage,
                                               [&] { return ncclEpHandleGetNumRecvTokens(facts.number, out); });
    if (!KeptOrWritten(result, rows == kOther, out != nullptr)) return;
    const auto num_ranks = static_cast<unsigned>(seat_.size);
    if (facts.group.max_tokens == NCCL_EP_AUTO) {
        referee_.Check(rows <= num_ranks * kMostTokens, "more rows than tokens");
    } else {
        referee_.Check(rows == num_ranks * facts.group.max_tokens, "another number of rows");
    }
}

void Player::AskVersion(Draw& draw) {
    int version = -1;
    int* out = draw.how.OneIn(4) ? nullptr : &version;
    const ncclResult_t result =
        referee_.Judge("ncclEpGetVersion", "", kArgument, [&] { return ncclEpGetVersion(out); });
    KeptOrWritten(result, version == -1, out != nullptr);
}

}  // namespace test_fuzz

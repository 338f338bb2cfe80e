// Dispatches, combines and completions with valid and with broken lists of tensors.
#include "suites/fuzz/player.h"

namespace test_fuzz {
// Scales of the rows that are sent, if there are any, and of `rows` rows of each of `experts` experts,
// or of 0 in HT. Ranks that have different numbers of tokens might disagree about strides.
void Player::AddScales(Dice& dice, const Handle& handle, const Row& row, unsigned experts, unsigned rows,
                       Lists* lists) const {
    const RefFormat& format = row.format;
    if (format.meaning == kRefOpaque) return;
    const unsigned type = row.scale_type, count = format.num_scales;
    const size_t room = memory_.slot_bytes();
    const Strides in = AnyStrides(dice, row, format.in_order, {1, handle.tokens}, handle.even, room);
    const Strides out = AnyStrides(dice, row, format.out_order, {experts > 0 ? experts : 1, rows}, true, room);
    if (format.meaning == kRefForward) {
        lists->in.AddScales(type, memory_.At(kScalesIn), Rows::kExact, {handle.tokens, count}, in);
    }
    void* const received = memory_.At(kReceivedScales);
    if (experts > 0) lists->out.AddScales(type, received, Rows::kExact, {experts, rows, count}, out);
    else lists->out.AddScales(type, received, Rows::kAtLeast, {rows, count}, out);
    lists->are_final = row.is_wild;
}

void Player::AddLlLists(Dice& dice, const Handle& handle, const Row& row, bool dispatch, Lists* lists) const {
    const unsigned experts = handle.group.local_experts;
    const unsigned slots = static_cast<unsigned>(seat_.size) * handle.group.max_tokens;
    if (dispatch) {
        lists->in.Add(Tokens(row.format.from), memory_.At(kTokensIn), Rows::kExact, {handle.tokens, row.format.hidden});
        lists->out.Add(Tokens(row.format.to), memory_.At(kReceived), Rows::kExact, {experts, slots, row.format.hidden});
        AddScales(dice, handle, row, experts, slots, lists);
        if (dice.OneIn(4)) return;
        lists->local.Add(kCounts, memory_.At(kCounter), Rows::kExact, {experts});
        return;
    }
    lists->in.Add(Tokens(row.format.from), memory_.At(kResultsIn), Rows::kExact, {experts, slots, row.format.hidden});
    lists->out.Add(Tokens(row.format.from), memory_.At(kCombined), Rows::kExact, {handle.tokens, row.format.hidden});
    List& weights = dice.OneIn(4) ? lists->in : lists->local;
    weights.Add(kWeights, memory_.At(kWeightsIn), Rows::kExact, {handle.tokens, handle.top_k});
}

void Player::AddHtLists(Dice& dice, const Handle& handle, const Row& row, bool dispatch, Lists* lists) const {
    const bool automatic = handle.group.max_tokens == NCCL_EP_AUTO;
    const unsigned most = automatic ? kMostTokens : handle.group.max_tokens;
    const unsigned rows = static_cast<unsigned>(seat_.size) * most + dice.Below(2);
    const bool routing = dice.OneIn(2);
    if (dispatch) {
        lists->in.Add(Tokens(row.format.from), memory_.At(kTokensIn), Rows::kExact, {handle.tokens, row.format.hidden});
        lists->out.Add(Tokens(row.format.to), memory_.At(kReceived), Rows::kAtLeast, {rows, row.format.hidden});
        AddScales(dice, handle, row, 0, rows, lists);
        if (dice.OneIn(2)) {
            lists->local.Add(kCounts, memory_.At(kCounter), Rows::kAtLeast, {handle.group.local_experts});
        }
        if (!routing) return;
        lists->in.Add(kIds, memory_.At(kIdsIn), Rows::kExact, {handle.tokens, handle.top_k});
        lists->in.Add(kWeights, memory_.At(kWeightsIn), Rows::kExact, {handle.tokens, handle.top_k});
        lists->out.Add(kIds, memory_.At(kReceivedIds), Rows::kAtLeast, {rows, handle.top_k});
        lists->out.Add(kWeights, memory_.At(kReceivedWeights), Rows::kAtLeast, {rows, handle.top_k});
        return;
    }
    lists->in.Add(Tokens(row.format.from), memory_.At(kResultsIn), Rows::kAtLeast, {rows, row.format.hidden});
    lists->out.Add(Tokens(row.format.from), memory_.At(kCombined), Rows::kExact, {handle.tokens, row.format.hidden});
    if (!routing) return;
    const unsigned columns = dice.OneIn(2) ? handle.top_k : dice.Between(1, kMostTopK);
    lists->in.Add(kWeights, memory_.At(kGradientsIn), Rows::kAtLeast, {rows, columns});
    lists->out.Add(kWeights, memory_.At(kGradientsOut), Rows::kExact, {handle.tokens, columns});
}

// Puts a tensor of ncclEpTensorCreate, maybe of another group, in place of one of ours. One that
// has rows for tokens must fit on all ranks or on none.
void Player::UseTensorOfLibrary(Dice& dice, bool even, Lists* lists) const {
    const Tensor& tensor = tensors_[dice.Below(kTensors)];
    List& list = dice.OneIn(2) ? lists->in : lists->out;
    if (tensor.alive && (even || tensor.descriptor.ndim != 2)) list.Replace(tensor.descriptor);
}

std::string Player::DrawLists(Draw& draw, const Handle& handle, bool dispatch, Lists* lists) const {
    bool low_latency = handle.group.low_latency;
    // The other mode's lists already break a rule; further changes could make them valid on some ranks.
    const bool other_mode = !draw.valid && draw.how.OneIn(20);
    if (other_mode) low_latency = !low_latency;
    const bool scaled = dispatch && !draw.valid && !other_mode && draw.how.OneIn(3);
    const Row row = scaled ? ScaledRow(draw.how, handle.group.row_bytes) : PlainRow(draw.how, handle.group.row_bytes);
    if (low_latency) {
        AddLlLists(draw.how, handle, row, dispatch, lists);
    } else {
        AddHtLists(draw.how, handle, row, dispatch, lists);
    }
    std::string text = low_latency ? "LL" : "HT";
    text += row.format.meaning == kRefCast ? ", cast" : scaled ? ", scales" : "";
    if (draw.valid || other_mode || lists->are_final || !draw.how.OneIn(3)) return text;
    for (unsigned changes = draw.how.Between(1, 2); changes > 0; --changes) {
        text += ", " + lists->Change(draw.how, handle.any_empty);
    }
    return text;
}

ncclResult_t Player::Launch(ncclEpHandle_t handle, bool dispatch, const Lists& lists, Way way,
                            const std::string& detail) {
    const auto result = referee_.Judge(dispatch ? "ncclEpDispatch" : "ncclEpCombine", detail, kArgument | kUsage, [&] {
        if (dispatch) {
            return ncclEpDispatch(handle, lists.in.inputs(), lists.in.count(), lists.out.outputs(), lists.out.count(),
                                  lists.local.outputs(), lists.local.count(), way.send_only,
                                  reinterpret_cast<const ncclEpDispatchConfig_t*>(way.config), way.stream);
        }
        return ncclEpCombine(handle, lists.in.inputs(), lists.in.count(), lists.out.outputs(), lists.out.count(),
                             lists.local.outputs(), lists.local.count(), way.send_only,
                             reinterpret_cast<const ncclEpCombineConfig_t*>(way.config), way.stream);
    });
    return result;
}

void Player::Operate(Draw& draw) {
    Handle facts;
    const int index = AnyHandle(draw.what, &facts);
    const bool dispatch = draw.what.Below(5) < 3;
    const unsigned send_only = draw.what.OneIn(3) ? 1 + draw.what.Below(9) : 0;
    Lists lists;
    std::string detail = DrawLists(draw, facts, dispatch, &lists);
    detail += ", handle " + std::to_string(index) + (send_only != 0 ? ", send_only" : "");
    // Staged operations use their tensors later, when these may be gone.
    if (send_only == 0 && facts.group.low_latency && draw.how.OneIn(6)) {
        UseTensorOfLibrary(draw.how, facts.even, &lists);
        detail += ", a tensor of the library";
    }
    // With anything but 0, scales that are forwarded are refused.
    const unsigned garbage = draw.how.OneIn(2) ? static_cast<unsigned>(draw.how.Seed()) : 0;
    const cudaStream_t stream = AnyStream(draw.how);
    const bool marked = draw.how.OneIn(12);
    if (marked) {
        Rest();
        memory_.MarkOutputs(streams_[1]);
    }
    lists.Remember();
    Order(facts.group.number, stream);
    const ncclResult_t result =
        Launch(facts.number, dispatch, lists, {send_only, draw.how.OneIn(2) ? nullptr : &garbage, stream}, detail);
    Ordered(stream);
    referee_.Check(lists.AreAsRemembered(), "changes a descriptor");
    if (result != ncclSuccess) {
        if (marked) referee_.Check(memory_.OutputsAreMarked(streams_[1]), "writes though refused");
        return;
    }
    referee_.Check(index >= 0, "a bad number is accepted");
    if (index >= 0) handles_[static_cast<size_t>(index)].staged = send_only != 0 && facts.group.low_latency;
}

void Player::Complete(Draw& draw) {
    Handle facts;
    const int index = AnyHandle(draw.what, &facts);
    const unsigned garbage = static_cast<unsigned>(draw.how.Seed());
    const auto* config = reinterpret_cast<const ncclEpCompleteConfig_t*>(draw.how.OneIn(2) ? nullptr : &garbage);
    const cudaStream_t stream = AnyStream(draw.how);
    Order(facts.group.number, stream);
    const ncclResult_t result = referee_.Judge("ncclEpComplete", "handle " + std::to_string(index), kArgument | kUsage,
                                               [&] { return ncclEpComplete(facts.number, config, stream); });
    Ordered(stream);
    if (result != ncclSuccess) return;
    referee_.Check(index >= 0, "a bad number is accepted");
    if (index >= 0) handles_[static_cast<size_t>(index)].staged = false;
}

}  // namespace test_fuzz

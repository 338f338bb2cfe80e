// Tensors that the library made, and descriptors made by hand.
#include <climits>
#include <cstdlib>

#include "suites/fuzz/player.h"

namespace test_fuzz {
namespace {

struct Shape {
    unsigned ndim;
    unsigned sizes[5];
    unsigned datatype;  // may be none of NCCL's
};

// A shape that an operation on a group may need, so that some tensors fit.
Shape UsefulShape(Dice& dice, const Group& group, unsigned num_ranks) {
    static const ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32};
    const ncclDataType_t datatype = dice.Pick(kTypes);
    const auto element = static_cast<unsigned>(ep_datatype_size(datatype));
    Shape shape{2, {dice.Between(1, kMostTokens), 0, 1, 1, 1}, unsigned{datatype}};
    shape.sizes[1] = group.row_bytes / element;
    if (dice.OneIn(2) && group.low_latency) {
        shape.ndim = 3;
        shape.sizes[0] = group.local_experts;
        shape.sizes[1] = num_ranks * group.max_tokens;
        shape.sizes[2] = group.row_bytes / element;
    }
    return shape;
}

Shape AnyShape(Dice& dice) {
    Shape shape{dice.Between(1, 5), {}, ncclInt8};
    for (unsigned& size : shape.sizes) size = dice.Below(7);
    shape.datatype = dice.Below(12);
    return shape;
}

// Breaks a rule. Sizes are below a megabyte, which is available, or at least a petabyte, which is not.
void Break(Dice& dice, Shape* shape) {
    static const unsigned kDims[] = {0, 6, 7, UINT_MAX};
    switch (dice.Below(4)) {
        case 0: shape->ndim = dice.Pick(kDims); break;
        case 1: shape->datatype = dice.OneIn(2) ? 12 + dice.Below(9) : UINT_MAX; break;
        case 2: *shape = {2, {1u << 25, 1u << 25, 1, 1, 1}, ncclInt8}; break;
        default: *shape = {5, {UINT_MAX, UINT_MAX, UINT_MAX, UINT_MAX, UINT_MAX}, ncclFloat64};
    }
}

}  // namespace

void Player::CreateTensor(Draw& draw) {
    Dice& dice = draw.how;
    size_t slot = 0;
    while (slot < kTensors && tensors_[slot].alive) ++slot;
    if (slot == kTensors) return DestroyTensor(draw);
    const int index = LivingGroup(dice, true, true);
    const ncclEpGroup_t group = AnyGroup(dice);
    Shape shape = dice.OneIn(2) && index >= 0
                      ? UsefulShape(dice, groups_[static_cast<size_t>(index)], static_cast<unsigned>(seat_.size))
                      : AnyShape(dice);
    if (dice.OneIn(4)) Break(dice, &shape);
    const Fails fails = dice.OneIn(8) ? (dice.OneIn(2) ? Fails::kWithError : Fails::kWithNull) : Fails::kNot;
    const unsigned tag =
        dice.OneIn(2) ? unsigned{NCCL_EP_TENSOR_TAG_TOKENS} : static_cast<unsigned>(dice.Seed() >> dice.Below(64));
    Tensor made;
    std::memset(&made.descriptor, 0x5e, sizeof(made.descriptor));
    const ncclNDTensor_t before = made.descriptor;
    ncclNDTensor_t* out = dice.OneIn(16) ? nullptr : &made.descriptor;
    const unsigned* sizes = shape.sizes;
    NextAllocation(fails);
    const ncclResult_t result =
        referee_.Judge("ncclEpTensorCreate", "ndim " + std::to_string(shape.ndim), kArgument | kSystem | kCuda, [&] {
            return ncclEpTensorCreate(group, out, shape.ndim, static_cast<ncclDataType_t>(shape.datatype),
                                      static_cast<ncclEpTensorTag_t>(tag), sizes[0], sizes[1], sizes[2], sizes[3],
                                      sizes[4]);
        });
    NextAllocation(Fails::kNot);
    const bool kept = std::memcmp(&before, &made.descriptor, sizeof(before)) == 0;
    if (!KeptOrWritten(result, kept, out != nullptr)) return;
    referee_.Check(made.descriptor.ndim == shape.ndim && made.descriptor.tag == tag, "writes another tensor");
    made.group = group;
    made.alive = true;
    tensors_[slot] = made;
}

void Player::DestroyTensor(Draw& draw) {
    Dice& dice = draw.how;
    const ncclEpGroup_t group = AnyGroup(dice);
    if (dice.OneIn(8)) {
        // Nothing to free, in two forms.
        ncclNDTensor_t empty{};
        referee_.Judge("ncclEpTensorDestroy", "nothing", 0,
                       [&] { return ncclEpTensorDestroy(group, draw.what.OneIn(2) ? nullptr : &empty); });
        return;
    }
    if (dice.OneIn(8)) {
        // By hand: without a group the data stays the caller's.
        ncclNDTensor_t mine{};
        mine.data = memory_.At(kTokensIn);
        mine.sizes = static_cast<unsigned*>(std::malloc(2 * sizeof(unsigned)));
        referee_.Judge("ncclEpTensorDestroy", "by hand", 0, [&] { return ncclEpTensorDestroy(nullptr, &mine); });
        referee_.Check(mine.data == nullptr && mine.sizes == nullptr, "leaves pointers");
        return;
    }
    const size_t slot = dice.Below(kTensors);
    // Data that the library allocated returns to its allocator, whatever group is named.
    DestroyTensorAt(slot, dice.OneIn(2) ? tensors_[slot].group : group);
}

void Player::DestroyTensorAt(size_t index, ncclEpGroup_t group) {
    Tensor& tensor = tensors_[index];
    if (!tensor.alive) return;
    Rest();  // an operation may be using it
    for (int times = 0; times < 2; ++times) {
        referee_.Judge("ncclEpTensorDestroy", "slot " + std::to_string(index), 0,
                       [&] { return ncclEpTensorDestroy(group, &tensor.descriptor); });
        referee_.Check(tensor.descriptor.data == nullptr && tensor.descriptor.sizes == nullptr &&
                           tensor.descriptor.strides == nullptr,
                       "leaves pointers");
    }
    tensor = Tensor();
}

}  // namespace test_fuzz

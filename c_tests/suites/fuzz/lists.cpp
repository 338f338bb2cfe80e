#include "suites/fuzz/lists.h"

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstring>
#include <utility>

namespace test_fuzz {
namespace {

constexpr unsigned kMaxDims = 5;

unsigned OtherThan(ep::Dice& dice, unsigned right) {
    // Deltas, not values: whatever is added, the sum is wrong.
    static const unsigned kDeltas[] = {1, 2, 3, 16, UINT_MAX, 0x7fffffff, 0x80000000, 0xfffffff0};
    return right + dice.Pick(kDeltas);
}

EpView* ViewOf(ncclNDTensor_t* tensor) {
    static_assert(offsetof(EpView, tensor) == 0);
    return reinterpret_cast<EpView*>(tensor);
}

char* Moved(void* data, unsigned bytes) { return static_cast<char*>(data) + bytes; }

}  // namespace

void List::Add(Kind kind, void* data, Rows rows, std::initializer_list<unsigned> sizes) {
    EP_REQUIRE(count_ < kMost && sizes.size() <= kMaxDims);
    EpView* view = &views_[count_];
    ep_view_1d(view, data, kind.datatype, kind.tag, 1);
    view->tensor.ndim = static_cast<unsigned>(sizes.size());
    unsigned* size = view->sizes;
    for (const unsigned extent : sizes) *size++ = extent;
    rows_[count_] = rows;
    items_[count_++] = &view->tensor;
}

void List::AddScales(unsigned datatype, void* data, Rows rows, std::initializer_list<unsigned> sizes,
                     const Strides& strides) {
    EP_REQUIRE(sizes.size() <= strides.size());
    Add({NCCL_EP_TENSOR_TAG_SCALES, ncclInt8}, data, rows, sizes);
    EpView* view = &views_[count_ - 1];
    SetRaw(&view->tensor.datatype, datatype);
    std::copy(strides.end() - static_cast<std::ptrdiff_t>(sizes.size()), strides.end(), view->strides);
    has_pitch_[count_ - 1] = true;
}

unsigned List::PositionOf(const ncclNDTensor_t* tensor) const {
    return static_cast<unsigned>(reinterpret_cast<const EpView*>(tensor) - views_);
}

void List::Replace(const ncclNDTensor_t& tensor) {
    for (unsigned i = 0; i < count_; ++i) {
        if (items_[i] == nullptr || items_[i]->tag != tensor.tag) continue;
        EpView* view = ViewOf(items_[i]);
        view->tensor = tensor;
        std::memcpy(view->sizes, tensor.sizes, tensor.ndim * sizeof(unsigned));
        std::memcpy(view->strides, tensor.strides, tensor.ndim * sizeof(unsigned));
        view->tensor.sizes = view->sizes;
        view->tensor.strides = view->strides;
        return;
    }
}

void List::AddUnused(ep::Dice& dice) {
    static const unsigned kTags[] = {NCCL_EP_TENSOR_TAG_NONE, NCCL_EP_TENSOR_TAG_TOKENS_PER_EXPERTS, 8, UINT_MAX};
    const unsigned size = dice.OneIn(2) ? dice.Below(4) : UINT_MAX;
    Add({NCCL_EP_TENSOR_TAG_NONE, ncclInt8}, WildPointer(), Rows::kExact, {size, size});
    items_[count_ - 1]->tag = dice.Pick(kTags);
    SetRaw(&items_[count_ - 1]->datatype, dice.Below(16));
    std::swap(items_[dice.Below(count_)], items_[count_ - 1]);
}

std::string List::ChangeList(ep::Dice& dice) {
    switch (dice.Below(6)) {
        case 0: wild_ = true; return "no tensors, wild array";
        case 1: null_ = true; return "NULL array";
        case 2: items_[dice.Below(count_)] = nullptr; return "NULL tensor";
        case 3:
            items_[dice.Below(count_)] = items_[count_ - 1];
            --count_;
            return "one tensor less";
        case 4: std::swap(items_[0], items_[dice.Below(count_)]); return "other order";
        default:
            if (count_ < kMost) AddUnused(dice);
            return "unused tensor";
    }
}

std::string List::ChangeSize(ep::Dice& dice, unsigned index) {
    ncclNDTensor_t* tensor = items_[index];
    const unsigned position = PositionOf(tensor);
    const unsigned dim = dice.Below(std::clamp(tensor->ndim, 1u, kMaxDims));
    if (tensor->sizes == nullptr) return "sizes NULL already";
    unsigned* size = &tensor->sizes[dim];
    if (dim == 0 && rows_[position] == Rows::kAtLeast) {
        *size += dice.Below(4);
    } else if (dim == 0 && rows_[position] == Rows::kAtMost) {
        *size = UINT_MAX - dice.Below(100);
    } else {
        *size = OtherThan(dice, *size);
    }
    return "sizes[" + std::to_string(dim) + "] = " + std::to_string(*size);
}

std::string List::ChangeTensor(ep::Dice& dice, unsigned index, bool any_empty) {
    static const unsigned kShifts[] = {1, 2, 4, 8, 16};
    ncclNDTensor_t* tensor = items_[index];
    if (tensor == nullptr) return "NULL tensor already";
    const std::string name = "tensor of tag " + std::to_string(tensor->tag) + ": ";
    switch (dice.Below(11)) {
        case 0: tensor->sizes = nullptr; return name + "sizes NULL";
        case 1: tensor->strides = nullptr; return name + "strides NULL";
        case 2:
            // The last extent is equal on all ranks, and an extent of 1 may have any stride.
            if (has_pitch_[PositionOf(tensor)]) return name + "strides stay";
            tensor->strides = ViewOf(tensor)->strides;
            tensor->strides[std::clamp(tensor->ndim, 1u, kMaxDims) - 1] = 2 + dice.Below(INT_MAX);
            return name + "a stride";
        case 3:
            tensor->ndim = dice.OneIn(2) ? dice.Below(kMaxDims + 3) : UINT_MAX;
            return name + "ndim " + std::to_string(tensor->ndim);
        case 4: SetRaw(&tensor->datatype, dice.OneIn(4) ? UINT_MAX : dice.Below(14)); return name + "datatype";
        case 5:
            tensor->tag = dice.OneIn(4) ? UINT_MAX : dice.Below(9);
            return name + "tag " + std::to_string(tensor->tag);
        case 6:
            tensor->version = static_cast<unsigned>(dice.Seed());
            SetRaw(&tensor->flags, static_cast<unsigned>(dice.Seed()));
            return name + "version and flags";
        case 7:
            if (!any_empty) tensor->data = nullptr;
            return name + "data NULL";
        case 8:
            if (!any_empty && tensor->data != nullptr) tensor->data = Moved(tensor->data, dice.Pick(kShifts));
            return name + "data moved";
        default: return name + ChangeSize(dice, index);
    }
}

std::string List::Change(ep::Dice& dice, bool any_empty) {
    if (count_ == 0) {
        AddUnused(dice);
        return "unused tensor";
    }
    if (dice.OneIn(4)) return ChangeList(dice);
    return ChangeTensor(dice, dice.Below(count_), any_empty);
}

void List::Remember() { std::memcpy(before_, views_, sizeof(before_)); }

bool List::IsAsRemembered() const { return std::memcmp(before_, views_, sizeof(before_)) == 0; }

std::string Lists::Change(ep::Dice& dice, bool any_empty) {
    switch (dice.Below(4)) {
        case 0: return "local " + local.Change(dice, any_empty);
        case 1: return "out " + out.Change(dice, any_empty);
        default: return "in " + in.Change(dice, any_empty);
    }
}

void Lists::Remember() {
    in.Remember();
    out.Remember();
    local.Remember();
}

bool Lists::AreAsRemembered() const { return in.IsAsRemembered() && out.IsAsRemembered() && local.IsAsRemembered(); }

}  // namespace test_fuzz

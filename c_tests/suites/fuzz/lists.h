// The lists of tensors of one call and their changes: harmless ones that callers may make, and ones
// that break a rule on every rank.
#pragma once

#include <cstring>
#include <initializer_list>
#include <string>

#include "suites/fuzz/rows.h"

namespace test_fuzz {

// How many rows a tensor must have.
enum class Rows {
    kExact,
    kAtLeast,  // more are fine, fewer fail while the operation runs
    kAtMost,   // the tokens of a handle's ids
};

// Any number in place of an enum; C++ itself does not allow reading one from memory.
template <typename Enum>
void SetRaw(Enum* to, unsigned number) {
    static_assert(sizeof(Enum) == sizeof(number));
    std::memcpy(to, &number, sizeof(number));
}

// An address that no call may dereference.
inline void* WildPointer() { return reinterpret_cast<void*>(uintptr_t{0xdead0000beef}); }

// What a tensor holds.
struct Kind {
    ncclEpTensorTag_t tag;
    ncclDataType_t datatype;
};
constexpr Kind kIds{NCCL_EP_TENSOR_TAG_TOPK_IDX, ncclInt64};
constexpr Kind kWeights{NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, ncclFloat32};
constexpr Kind kCounts{NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, ncclInt32};
constexpr Kind Tokens(ncclDataType_t datatype) { return {NCCL_EP_TENSOR_TAG_TOKENS, datatype}; }

class List {
   public:
    static constexpr unsigned kMost = 7;

    List() = default;
    List(const List&) = delete;
    List& operator=(const List&) = delete;

    void Add(Kind kind, void* data, Rows rows, std::initializer_list<unsigned> sizes);
    // Scales with these strides, of which the last ones count, as many as there are sizes. They are
    // not changed later: other strides may be allowed, too, and leave the memory.
    void AddScales(unsigned datatype, void* data, Rows rows, std::initializer_list<unsigned> sizes,
                   const Strides& strides);
    // Puts a tensor that somebody else owns in place of the first one of its tag.
    void Replace(const ncclNDTensor_t& tensor);

    // Changes something; `any_empty` says that some ranks, not all, may have tensors without rows.
    // Returns what it changed.
    std::string Change(ep::Dice& dice, bool any_empty);

    ncclNDTensor_t* const* outputs() const { return wild_ ? Wild() : null_ ? nullptr : items_; }
    const ncclNDTensor_t* const* inputs() const { return outputs(); }
    unsigned count() const { return wild_ ? 0 : count_; }
    // NULL if a change emptied the list.
    ncclNDTensor_t* first() const { return count_ > 0 ? items_[0] : nullptr; }

    // Stores what a call must leave unchanged.
    void Remember();
    bool IsAsRemembered() const;

   private:
    static ncclNDTensor_t* const* Wild() { return static_cast<ncclNDTensor_t* const*>(WildPointer()); }
    std::string ChangeList(ep::Dice& dice);
    std::string ChangeTensor(ep::Dice& dice, unsigned index, bool any_empty);
    std::string ChangeSize(ep::Dice& dice, unsigned index);
    void AddUnused(ep::Dice& dice);
    unsigned PositionOf(const ncclNDTensor_t* tensor) const;

    EpView views_[kMost]{};
    EpView before_[kMost]{};
    ncclNDTensor_t* items_[kMost]{};
    Rows rows_[kMost]{};
    bool has_pitch_[kMost]{};
    unsigned count_ = 0;
    bool null_ = false;
    bool wild_ = false;  // a count of 0 with a wild array
};

struct Lists {
    List in, out, local;
    // Whether further changes could turn wrong scales into right ones that do not fit their memory.
    bool are_final = false;

    std::string Change(ep::Dice& dice, bool any_empty);
    void Remember();
    bool AreAsRemembered() const;
};

}  // namespace test_fuzz

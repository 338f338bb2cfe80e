// NCCL EP in C++17: groups and handles that destroy themselves, tensors as views, errors as results
// or exceptions. Header only, over nccl_ep.h, which documents each call in full.
//
//   auto config = nccl_ep::group_config(NCCL_EP_ALGO_LOW_LATENCY);
//   config.num_experts = 256, config.max_tokens_per_rank = 128, config.token_size_bytes = 7168 * 2;
//   auto group = nccl_ep::Group::create(comm, config, stream).value();
//   auto ids = nccl_ep::Tensor::topk_idx(topk_idx, {T, K});
//   auto handle = nccl_ep::Handle::create(group, ids, {}, stream).value();
//   handle.dispatch(tokens, received, counts, stream).value();  // lists of one tensor each
//   handle.combine(results, combined, weights, stream).value();
//
// Errors: calls return a [[nodiscard]] `Result`. `.value()` throws its `Error`, and is absent with
// -fno-exceptions; or test it: `if (!result) return result.error().code();`.
//
// Lists of tensors, by tag, in any order (R ranks, L local experts, M max_tokens_per_rank, T tokens
// of this rank, K top-k, H hidden size, n most rows that this rank receives):
//
//   call                inputs                      outputs                     locals
//   LL dispatch         tokens [T, H]               tokens [L, R*M, H]          expert_counts [L]
//   LL combine          tokens [L, R*M, H]          tokens [T, H]               topk_weights [T, K]
//   HT dispatch         tokens [T, H]               tokens [n, H]               expert_counts [L]
//     with routing      + topk_idx, _weights [T, K] + topk_idx, _weights [n, K]
//   HT combine          tokens [n, H]               tokens [T, H]
//     with gradients    + topk_weights [n, K]       + topk_weights [T, K]
//   Handle::create, HT                                                          expert_counts [L]
//
// Rank-major LL: a dispatch of tokens and topk_weights [T, K] to tokens [R, M, H], topk_idx and topk_weights [R, M, K],
// expert_counts [R]; a combine of tokens [R, M, H], without weights. Only ncclEpDispatch tells the address of a view.
// expert_counts are optional everywhere. A dispatch may also have scales: outputs [L, R*M, S] or
// [n, S], and inputs [T, S] if they come with the rows. Tokens are of any type in a dispatch,
// ncclBfloat16, ncclFloat16 or ncclFloat32 in a combine; a row is a multiple of 16 bytes.
//
// Names, threads, streams and graphs: as in nccl_ep.h. A moved-from or default-constructed object
// is empty: calls on it are refused, and it destroys nothing.

#pragma once

#include "nccl_ep.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <variant>

namespace nccl_ep {

// ---- Errors

// Why a call was refused or failed; `what()` names function, argument, rule, got and expected.
class Error : public std::runtime_error {
   public:
    // Copies the text of this thread's last refusal.
    Error(ncclResult_t code, const char* call) : std::runtime_error(ncclEpGetLastError()), code_(code), call_(call) {}

    ncclResult_t code() const noexcept { return code_; }
    const char* call() const noexcept { return call_; }  // the C function: "ncclEpDispatch"

   private:
    ncclResult_t code_;
    const char* call_;
};

// A value or an `Error`, with the member names of std::expected.
template <typename T = void>
class [[nodiscard]] Result {
    using Value = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

   public:
    Result(Value value) noexcept : state_(std::in_place_index<0>, std::move(value)) {}
    Result(Error error) noexcept : state_(std::in_place_index<1>, std::move(error)) {}
    template <typename Code, std::enable_if_t<std::is_same_v<Code, ncclResult_t>, int> = 0>
    Result(Code) = delete;  // a code is no number of rows

    bool has_value() const noexcept { return state_.index() == 0; }
    explicit operator bool() const noexcept { return has_value(); }
    ncclResult_t code() const noexcept { return has_value() ? ncclSuccess : error().code(); }

    // Require a value; `error` requires that there is none.
    Value& operator*() & noexcept { return *std::get_if<0>(&state_); }
    const Value& operator*() const& noexcept { return *std::get_if<0>(&state_); }
    Value operator*() && noexcept { return std::move(**this); }
    Value* operator->() noexcept { return std::get_if<0>(&state_); }
    const Error& error() const noexcept { return *std::get_if<1>(&state_); }

#ifdef __cpp_exceptions
    // Returns the value, or throws the error.
    T value() && {
        if (!has_value()) throw error();
        if constexpr (!std::is_void_v<T>) return std::move(**this);
    }
    std::add_lvalue_reference_t<T> value() & {
        if (!has_value()) throw error();
        if constexpr (!std::is_void_v<T>) return **this;
    }
#endif

   private:
    std::variant<Value, Error> state_;
};

namespace detail {

inline Result<> result_of(ncclResult_t code, const char* call) {
    if (code != ncclSuccess) return Error(code, call);
    return std::monostate{};
}

// The element type of an array, a std::vector, a std::array or a std::span.
template <typename List>
using ElementOf = std::remove_cv_t<std::remove_pointer_t<decltype(std::data(std::declval<const List&>()))>>;

}  // namespace detail

// ---- Tensors

// Extents of a tensor, slowest dimension first, or strides: 1 to 5 integers of any type, in braces, an array or a span.
// A sixth, or one that does not fit an unsigned int, makes the shape one of no dimensions, which every call refuses.
class Shape {
   public:
    template <typename... Size, std::enable_if_t<(sizeof...(Size) > 0) && (std::is_integral_v<Size> && ...), int> = 0>
    constexpr Shape(Size... sizes) noexcept {
        (add(static_cast<unsigned long long>(sizes)), ...);
    }
    template <typename List, std::enable_if_t<std::is_integral_v<detail::ElementOf<List>>, int> = 0>
    constexpr Shape(const List& sizes) noexcept {
        for (const auto size : sizes) add(static_cast<unsigned long long>(size));
    }

    constexpr unsigned ndim() const noexcept { return fits_ ? ndim_ : 0; }
    // Five numbers; those beyond `ndim` are 0.
    constexpr const unsigned* data() const noexcept { return sizes_.data(); }

   private:
    constexpr void add(unsigned long long size) noexcept {
        fits_ = fits_ && ndim_ < kMost && static_cast<unsigned>(size) == size;
        if (fits_) sizes_[ndim_++] = static_cast<unsigned>(size);
    }

    static constexpr unsigned kMost = 5;
    std::array<unsigned, kMost> sizes_{};
    unsigned ndim_ = 0;
    bool fits_ = true;
};

// A view of your device memory: tag, address, type and shape. A call copies what it needs of it. The memory must stay
// until the operation has run; that of a handle's ids, as long as the handle.
class Tensor {
   public:
    Tensor(ncclEpTensorTag_t tag, void* data, ncclDataType_t type, Shape shape) noexcept
        : tag_(tag), type_(type), data_(data), shape_(shape) {}

    static Tensor tokens(void* data, ncclDataType_t type, Shape shape) noexcept {
        return Tensor(NCCL_EP_TENSOR_TAG_TOKENS, data, type, shape);
    }
    static Tensor scales(void* data, ncclDataType_t type, Shape shape) noexcept {
        return Tensor(NCCL_EP_TENSOR_TAG_SCALES, data, type, shape);
    }
    static Tensor topk_idx(std::int64_t* data, Shape shape) noexcept {
        return Tensor(NCCL_EP_TENSOR_TAG_TOPK_IDX, data, ncclInt64, shape);
    }
    static Tensor topk_weights(float* data, Shape shape) noexcept {
        return Tensor(NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, data, ncclFloat32, shape);
    }
    // Gets the received tokens of each local expert; in device memory.
    static Tensor expert_counts(std::int32_t* data, Shape shape) noexcept {
        return Tensor(NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, data, ncclInt32, shape);
    }
    // The same in mapped pinned host memory, for `Handle::create` in HT.
    static Tensor expert_counts_on_host(std::int32_t* data, Shape shape) noexcept {
        return Tensor(NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_HOST, data, ncclInt32, shape);
    }

    // For scales that are not dense: elements between neighbours in each dimension.
    Tensor with_strides(Shape strides) const noexcept {
        Tensor strided = *this;
        strided.strides_ = strides;
        return strided;
    }

    ncclEpTensorTag_t tag() const noexcept { return tag_; }
    ncclDataType_t type() const noexcept { return type_; }
    void* data() const noexcept { return data_; }
    const Shape& shape() const noexcept { return shape_; }

    // A descriptor for C. It points into this view: valid while the view lives and is not moved.
    ncclNDTensor_t raw() const noexcept {
        const auto numbers = [](const Shape& of) { return const_cast<unsigned*>(of.data()); };
        unsigned* const strides = strides_ ? numbers(*strides_) : nullptr;
        return {1, shape_.ndim(), numbers(shape_), strides, type_, data_, static_cast<unsigned>(tag_), {}};
    }

   private:
    ncclEpTensorTag_t tag_;
    ncclDataType_t type_;
    void* data_;
    Shape shape_;
    std::optional<Shape> strides_;
};

// A span of tensors, as an argument only: one, several in braces, an array, a std::vector or a std::span; {} for none.
class Tensors {
   public:
    constexpr Tensors() noexcept = default;
    constexpr Tensors(const Tensor& one) noexcept : first_(&one), size_(1) {}
    constexpr Tensors(std::initializer_list<Tensor> list) noexcept : size_(list.size()) { first_ = list.begin(); }
    template <typename List, std::enable_if_t<std::is_same_v<detail::ElementOf<List>, Tensor>, int> = 0>
    constexpr Tensors(const List& list) noexcept : first_(std::data(list)), size_(std::size(list)) {}

    constexpr std::size_t size() const noexcept { return size_; }
    constexpr const Tensor& operator[](std::size_t index) const noexcept { return first_[index]; }

   private:
    const Tensor* first_ = nullptr;
    std::size_t size_ = 0;
};

namespace detail {

// The descriptors of a list, for the duration of a call.
class Descriptors {
   public:
    explicit Descriptors(Tensors tensors) noexcept : size_(static_cast<unsigned>(tensors.size())) {
        for (std::size_t i = 0; i < tensors.size() && i < kMost; ++i) {
            raw_[i] = tensors[i].raw();
            pointers_[i] = &raw_[i];
        }
    }

    ncclNDTensor_t* const* data() const noexcept { return pointers_.data(); }
    unsigned size() const noexcept { return size_; }

   private:
    static constexpr std::size_t kMost = 16;  // longer lists are refused before they are looked at
    std::array<ncclNDTensor_t, kMost> raw_;
    std::array<ncclNDTensor_t*, kMost> pointers_;
    unsigned size_;
};

struct Destroy {
    cudaStream_t stream = nullptr;  // of groups
    void operator()(ncclEpGroup_t group) const noexcept { (void)ncclEpGroupDestroy(group, stream); }
    void operator()(ncclEpHandle_t handle) const noexcept { (void)ncclEpHandleDestroy(handle); }
};

}  // namespace detail

// ---- Groups

// A configuration with every optional field left to the library; set the required numbers.
inline ncclEpGroupConfig_t group_config(ncclEpAlgorithm_t algorithm) noexcept {
    ncclEpGroupConfig_t config{};
    config.version = 1, config.algorithm = algorithm;
    return config;
}

// The ranks of a communicator that exchange tokens. Creation and destruction are collective, so the destructor, too,
// waits for the other ranks; until the deadline, if only this rank got an exception. It uses the stream of the
// creation: that and the communicator must still exist.
class Group {
   public:
    Group() noexcept = default;
    // Takes over a group of the C functions.
    explicit Group(ncclEpGroup_t group, cudaStream_t stream) noexcept : group_(group, {stream}) {}

    // As ncclEpCreateGroup.
    static Result<Group> create(ncclComm_t comm, const ncclEpGroupConfig_t& config, cudaStream_t stream) {
        ncclEpGroup_t group = nullptr;
        if (auto code = ncclEpCreateGroup(&group, comm, &config, stream)) return Error(code, "ncclEpCreateGroup");
        return Group(group, stream);
    }

    // As the destructor, but returns failures. The group is kept only if `stream` is captured.
    Result<> destroy(cudaStream_t stream) {
        const ncclResult_t code = ncclEpGroupDestroy(group_.get(), stream);
        if (code != ncclInvalidUsage) (void)group_.release();
        return detail::result_of(code, "ncclEpGroupDestroy");
    }

    // The error of an operation of the group that failed while it ran, if any; such a group refuses all others.
    Result<> async_error() const {
        ncclResult_t state = ncclSuccess;
        const ncclResult_t code = ncclEpGetAsyncError(group_.get(), &state);
        return detail::result_of(code != ncclSuccess ? code : state, "ncclEpGetAsyncError");
    }

    // Makes dispatches add the rows that each local expert receives to these. As ncclEpGroupCountRows.
    Result<> count_rows(std::int64_t* rows_of_expert) const {
        return detail::result_of(ncclEpGroupCountRows(group_.get(), rows_of_expert), "ncclEpGroupCountRows");
    }

    // Make LL dispatches, and combines, add the nanoseconds that they wait for each rank. As ncclEpGroupTimeWaits and
    // ncclEpGroupTimeCombineWaits.
    Result<> time_waits(std::int64_t* ns_of_source) const {
        return detail::result_of(ncclEpGroupTimeWaits(group_.get(), ns_of_source), "ncclEpGroupTimeWaits");
    }
    Result<> time_combine_waits(std::int64_t* ns_of_rank) const {
        return detail::result_of(ncclEpGroupTimeCombineWaits(group_.get(), ns_of_rank), "ncclEpGroupTimeCombineWaits");
    }

    // For the C functions.
    ncclEpGroup_t get() const noexcept { return group_.get(); }
    ncclEpGroup_t release() noexcept { return group_.release(); }
    explicit operator bool() const noexcept { return group_ != nullptr; }

   private:
    std::unique_ptr<ncclEpGroup, detail::Destroy> group_;
};

// ---- Handles

// LL: `send` only sends, and `Handle::complete` receives; the same on every rank. HT ignores it.
enum class Phase : unsigned { whole = 0, send = 1 };

// What a cast does with its float32 scales.
enum class ScaleRounding : unsigned { none = 0, power_of_two = 1 };

// One routing of this rank's tokens to experts, and the operations on it, enqueued on a stream.
class Handle {
   public:
    Handle() noexcept = default;
    // Takes over a handle of the C functions.
    explicit Handle(ncclEpHandle_t handle) noexcept : handle_(handle) {}

    // As ncclEpCreateHandle: collective in HT. LL reads the ids in every operation, so their memory must stay.
    static Result<Handle> create(const Group& group, const Tensor& topk_idx, Tensors locals, cudaStream_t stream) {
        const ncclNDTensor_t ids = topk_idx.raw();
        const detail::Descriptors l(locals);
        ncclEpHandle_t handle = nullptr;
        const auto code = ncclEpCreateHandle(&handle, group.get(), &ids, l.data(), l.size(), nullptr, stream, false);
        if (code != ncclSuccess) return Error(code, "ncclEpCreateHandle");
        return Handle(handle);
    }

    // A handle without a routing; `update` gives it one. As ncclEpHandleOpen or ncclEpHandleOpenBounded: local.
    static Result<Handle> open(const Group& group, unsigned alignment = 0, std::optional<unsigned> max_rows = {}) {
        ncclEpHandle_t handle = nullptr;
        const auto code = max_rows ? ncclEpHandleOpenBounded(&handle, group.get(), alignment, *max_rows)
                                   : ncclEpHandleOpen(&handle, group.get(), alignment);
        if (code != ncclSuccess) return Error(code, max_rows ? "ncclEpHandleOpenBounded" : "ncclEpHandleOpen");
        return Handle(handle);
    }

    // Routes by these ids from now on. As ncclEpHandleUpdate: collective in HT, on one node also in a captured stream.
    Result<> update(const Tensor& topk_idx, Tensors locals, cudaStream_t stream) {
        const ncclNDTensor_t ids = topk_idx.raw();
        const detail::Descriptors l(locals);
        return detail::result_of(ncclEpHandleUpdate(handle_.get(), &ids, l.data(), l.size(), stream),
                                 "ncclEpHandleUpdate");
    }

    // As the destructor, but returns failures. Local.
    Result<> destroy() { return detail::result_of(ncclEpHandleDestroy(handle_.release()), "ncclEpHandleDestroy"); }

    // HT: the most rows that a dispatch delivers to this rank; see ncclEpHandleGetNumRecvTokens.
    Result<unsigned> num_recv_tokens() const {
        unsigned rows = 0;
        const ncclResult_t code = ncclEpHandleGetNumRecvTokens(handle_.get(), &rows);
        if (code != ncclSuccess) return Error(code, "ncclEpHandleGetNumRecvTokens");
        return rows;
    }

    // Sends each token to the ranks of its experts. As ncclEpDispatch.
    Result<> dispatch(Tensors inputs, Tensors outputs, Tensors locals, cudaStream_t stream,
                      Phase phase = Phase::whole, ScaleRounding rounding = ScaleRounding::none) {
        const detail::Descriptors in(inputs), out(outputs), l(locals);
        const ncclEpDispatchConfig_t config = {static_cast<unsigned>(rounding)};
        return detail::result_of(ncclEpDispatch(handle_.get(), in.data(), in.size(), out.data(), out.size(), l.data(),
                                                l.size(), static_cast<unsigned>(phase), &config, stream),
                                 "ncclEpDispatch");
    }

    // Sends the experts' results home and sums them. As ncclEpCombine.
    Result<> combine(Tensors inputs, Tensors outputs, Tensors locals, cudaStream_t stream, Phase phase = Phase::whole) {
        const detail::Descriptors in(inputs), out(outputs), l(locals);
        return detail::result_of(ncclEpCombine(handle_.get(), in.data(), in.size(), out.data(), out.size(), l.data(),
                                               l.size(), static_cast<unsigned>(phase), nullptr, stream),
                                 "ncclEpCombine");
    }

    // Receives what `Phase::send` sent, if anything. As ncclEpComplete.
    Result<> complete(cudaStream_t stream) {
        return detail::result_of(ncclEpComplete(handle_.get(), nullptr, stream), "ncclEpComplete");
    }

    // For the C functions.
    ncclEpHandle_t get() const noexcept { return handle_.get(); }
    ncclEpHandle_t release() noexcept { return handle_.release(); }
    explicit operator bool() const noexcept { return handle_ != nullptr; }

   private:
    std::unique_ptr<ncclEpHandle, detail::Destroy> handle_;
};

}  // namespace nccl_ep

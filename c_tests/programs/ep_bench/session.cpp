// Set-up of one measurement, in the order and with the settings of the reference's program, and the
// measured calls. If the library refuses, the program ends with its text: there is nothing to time.
#include "programs/ep_bench/session.h"

#include <vector>

namespace ep_bench {
namespace {

// Where the rows of experts lie: each tensor in an allocation of its own, or with --memory symmetric all in one object
// of the group, which the peers map. For ncclEpCreateGroup, which takes functions without a context: tensors that the
// library makes while a heap is open lie there.
struct Heap {
    char* begin = nullptr;
    char* end = nullptr;
    char* next = nullptr;
    bool is_open = false;
};
Heap heap;

cudaError_t HeapAlloc(void** device, size_t bytes) {
    constexpr size_t kAlign = 256;
    if (!heap.is_open) return ep_counted_alloc(device, bytes);
    const size_t taken = (bytes + kAlign - 1) / kAlign * kAlign;
    if (taken > static_cast<size_t>(heap.end - heap.next)) return cudaErrorMemoryAllocation;
    *device = heap.next;
    heap.next += taken;
    return cudaSuccess;
}

cudaError_t HeapFree(void* device) {
    const char* const at = static_cast<const char*>(device);
    return at >= heap.begin && at < heap.end ? cudaSuccess : ep_counted_free(device);
}

// Makes an object of the group. Collective; it ends with the group.
void OpenHeap(ncclEpGroup_t group, size_t bytes) {
    void* memory = nullptr;
    EP_REQUIRE_NCCL(ncclEpMemAlloc(group, &memory, bytes));
    heap.begin = heap.next = static_cast<char*>(memory);
    heap.end = heap.begin + bytes;
    heap.is_open = true;
}

// Tensors that are made from now on are not in it.
void CloseHeap() { heap.is_open = false; }

}  // namespace

double FreeBytes() { return static_cast<double>(ep_free_bytes()); }

RefRows TokenRows(const Options& options) {
    constexpr uint64_t kSeed = 1;
    return {ncclBfloat16, options.hidden, kSeed, false};
}

Session::Session(EpEnv* env, const Options& options, const Routing& routing)
    : env_(env), options_(options), routing_(routing), free_before_(FreeBytes()) {
    CreateGroup();
    CreateHandle();
    const double free_between = FreeBytes();
    library_bytes_ = free_before_ - free_between;
    CreateInputs();
    CreateOutputs();
    tensor_bytes_ = free_between - FreeBytes();
    ep_barrier();
}

void Session::CreateGroup() {
    const Shape& shape = routing_.shape();
    ncclEpGroupConfig_t config =
        ep_group_config(options_.algorithm, shape.experts, options_.dynamic_tokens ? NCCL_EP_AUTO : shape.max_tokens,
                        options_.hidden * static_cast<unsigned>(sizeof(uint16_t)));
    if (options_.low_latency()) config.num_qp_per_rank = shape.local_experts();
    config.num_channels = options_.channels;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group_, env_->comm, &config, env_->stream, HeapAlloc, HeapFree));
    const ncclEpChoice_t choice = {sizeof(choice), options_.variant, 0, 0, 0, 0};
    if (options_.variant == NCCL_EP_VARIANT_AUTO) return;
    // Those without it pass it over.
    for (unsigned operation = NCCL_EP_OPERATION_LL_COMBINE; operation <= NCCL_EP_OPERATION_HT_COMBINE; ++operation) {
        EP_REQUIRE_NCCL(ncclEpSetChoice(group_, operation, &choice));
    }
}

void Session::CreateHandle() {
    const Shape& shape = routing_.shape();
    topk_data_ = ep_device_upload(routing_.ids(routing_.rank(), 0),
                                  size_t{routing_.tokens()} * shape.top_k * sizeof(int64_t));
    ep_view_2d(&topk_idx_, topk_data_, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, routing_.tokens(), shape.top_k);
    handle_ = CallCreateHandle();
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env_->stream));
}

ncclEpHandle_t Session::CallCreateHandle() {
    ncclEpHandle_t handle = nullptr;
    EP_REQUIRE_NCCL(ncclEpCreateHandle(&handle, group_, &topk_idx_.tensor, nullptr, 0, nullptr,
                                       env_->stream, options_.use_fp8));
    return handle;
}

void Session::CreateInputs() {
    const unsigned num_tokens = routing_.tokens();
    const DispatchRows& rows = options_.rows;
    weights_ = ep_tensor_2d(group_, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, num_tokens, routing_.shape().top_k);
    ep_tensor_upload(&weights_, routing_.all().weights[routing_.rank()]);
    const unsigned hidden = rows.scaled ? rows.scaled->hidden : options_.hidden;
    const ncclDataType_t from = rows.scaled ? rows.scaled->from : ncclBfloat16;
    tokens = ep_tensor_2d(group_, rows.casts_outside() ? rows.scaled->to : from,
                          NCCL_EP_TENSOR_TAG_TOKENS, num_tokens, hidden);
    if (rows.sends_scales()) {
        scales = ep_tensor_2d(group_, rows.scaled->scale_type, NCCL_EP_TENSOR_TAG_SCALES, num_tokens,
                              rows.scaled->num_scales);
    }
    if (rows.casts_outside()) CreateUncast();
    FillTokens();
    if (rows.casts_outside()) CallCast();
}

void Session::CreateUncast() {
    const RefFormat& format = *options_.rows.scaled;
    uncast_ = ep_tensor_2d(group_, format.from, NCCL_EP_TENSOR_TAG_TOKENS, routing_.tokens(), format.hidden);
    const ScaleForm powers = format.scale_type == ncclFloat32 ? ScaleForm::kPower : ScaleForm::kExponent;
    cast_ = {uncast_.data,  tokens.data,  scales.data, routing_.tokens(),
             format.hidden, format.block, format.round ? powers : ScaleForm::kFloat};
}

void Session::FillTokens() {
    const unsigned num_tokens = routing_.tokens();
    if (!options_.rows.scaled) {
        const RefRows rows = TokenRows(options_);
        std::vector<uint16_t> host(ep_tensor_elements(&tokens));
        ref_rows_fill(&rows, routing_.rank(), 0, num_tokens, host.data());
        ep_tensor_upload(&tokens, host.data());
        return;
    }
    const RefFormat& format = *options_.rows.scaled;
    const size_t row_bytes = ref_format_in_bytes(&format);
    const size_t scale_bytes = ref_format_scale_bytes(&format);
    std::vector<uint8_t> rows(num_tokens * row_bytes);
    std::vector<uint8_t> row_scales(num_tokens * scale_bytes);
    for (size_t token = 0; token < num_tokens; ++token) {
        FillRow(options_.rows, ref_row_of(routing_.rank(), token), &rows[token * row_bytes],
                &row_scales[token * scale_bytes]);
    }
    ep_tensor_upload(options_.rows.casts_outside() ? &uncast_ : &tokens, rows.data());
    if (options_.rows.forward) ep_tensor_upload(&scales, row_scales.data());
}

void Session::CreateReceived() {
    const Shape& shape = routing_.shape();
    const DispatchRows& rows = options_.rows;
    const ncclDataType_t type = rows.scaled ? rows.scaled->to : ncclBfloat16;
    const unsigned hidden = rows.scaled ? rows.scaled->hidden : options_.hidden;
    const unsigned parts = options_.by_rank ? shape.ranks : shape.local_experts();
    const unsigned slots = options_.by_rank ? shape.max_tokens : shape.ranks * shape.max_tokens;
    unsigned received_rows = 0;
    if (options_.low_latency()) {
        received = ep_tensor_3d(group_, type, NCCL_EP_TENSOR_TAG_TOKENS, parts, slots, hidden);
    } else {
        EP_REQUIRE_NCCL(ncclEpHandleGetNumRecvTokens(handle_, &received_rows));
        received = ep_tensor_2d(group_, type, NCCL_EP_TENSOR_TAG_TOKENS, received_rows, hidden);
    }
    if (!rows.scaled) return;
    const unsigned num_scales = rows.scaled->num_scales;
    const ncclDataType_t scale_type = rows.scaled->scale_type;
    received_scales = options_.low_latency()
                          ? ep_tensor_3d(group_, scale_type, NCCL_EP_TENSOR_TAG_SCALES, parts, slots, num_scales)
                          : ep_tensor_2d(group_, scale_type, NCCL_EP_TENSOR_TAG_SCALES, received_rows, num_scales);
}

void Session::CreateOutputs() {
    const Shape& shape = routing_.shape();
    const unsigned hidden = options_.hidden;
    constexpr auto tokens_tag = NCCL_EP_TENSOR_TAG_TOKENS;
    combined = ep_tensor_2d(group_, ncclBfloat16, tokens_tag, routing_.tokens(), hidden);
    if (options_.symmetric) OpenHeap(group_, BytesOfHeap());
    CreateReceived();
    received_memory_ = received.data;
    if (options_.low_latency()) {
        const unsigned* sizes = received.sizes;
        expert_outputs = ep_tensor_3d(group_, ncclBfloat16, tokens_tag, sizes[0], sizes[1], hidden);
        counter = ep_tensor_1d(group_, ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE, sizes[0]);
        if (options_.by_rank) CreateReceivedBeside();
    } else {
        const unsigned rows = received.sizes[0];
        expert_outputs = ep_tensor_2d(group_, ncclBfloat16, tokens_tag, rows, hidden);
        received_weights = ep_tensor_2d(group_, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, rows, shape.top_k);
        received_idx = ep_tensor_2d(group_, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, rows, shape.top_k);
    }
    CloseHeap();
    ep_tensor_fill(&expert_outputs, 0);
}

// With room for all that may be received, twice, and what is beside rows.
size_t Session::BytesOfHeap() const {
    const Shape& shape = routing_.shape();
    const bool by_expert = options_.low_latency() && !options_.by_rank;
    const size_t rows = size_t{shape.ranks} * shape.max_tokens * (by_expert ? shape.local_experts() : 1);
    constexpr size_t kBytesOfEntry = sizeof(int64_t) + sizeof(float);
    const size_t of_row = 3 * sizeof(uint16_t) * options_.hidden + kBytesOfEntry * shape.top_k;
    constexpr size_t kMore = 1 << 20;
    return rows * of_row + kMore;
}

void Session::CreateReceivedBeside() {
    const unsigned* sizes = received.sizes;
    const unsigned top_k = routing_.shape().top_k;
    received_weights = ep_tensor_3d(group_, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, sizes[0], sizes[1], top_k);
    received_idx = ep_tensor_3d(group_, ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, sizes[0], sizes[1], top_k);
}

Session::~Session() {
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env_->stream));
    if (options_.view) received.data = received_memory_;
    ep_device_free(topk_data_);
    for (ncclNDTensor_t* tensor : {&tokens, &scales, &weights_, &uncast_, &received, &received_scales,
                                   &received_weights, &received_idx, &counter, &expert_outputs, &combined}) {
        EP_REQUIRE_NCCL(ncclEpTensorDestroy(group_, tensor));
    }
    EP_REQUIRE_NCCL(ncclEpHandleDestroy(handle_));
    EP_REQUIRE_NCCL(ncclEpGroupDestroy(group_, env_->stream));
}

void Session::NoteMemoryOfUse() { library_bytes_ = free_before_ - FreeBytes() - tensor_bytes_; }

void Session::CallCast() { EP_REQUIRE_CUDA(EnqueueCast(&cast_, env_->stream)); }

void Session::CallDispatch() {
    const bool ll = options_.low_latency();
    const DispatchRows& rows = options_.rows;
    ncclEpDispatchConfig_t config{};
    config.round_scales = rows.scaled && rows.scaled->round && !rows.sends_scales() ? 1 : 0;
    const ncclNDTensor_t* inputs[4] = {&tokens};
    ncclNDTensor_t* outputs[4] = {&received};
    unsigned num_inputs = 1;
    unsigned num_outputs = 1;
    if (rows.sends_scales()) inputs[num_inputs++] = &scales;
    if (rows.scaled) outputs[num_outputs++] = &received_scales;
    if (!ll || options_.by_rank) {
        inputs[num_inputs++] = &weights_;
        if (!ll) inputs[num_inputs++] = &topk_idx_.tensor;
        outputs[num_outputs++] = &received_weights;
        outputs[num_outputs++] = &received_idx;
    }
    ncclNDTensor_t* locals[] = {&counter};
    if (options_.view) received.data = nullptr;  // gets the address of the view
    EP_REQUIRE_NCCL(ncclEpDispatch(handle_, inputs, num_inputs, outputs, num_outputs, locals,
                                   ll ? 1 : 0, 0, &config, env_->stream));
}

void Session::CallCombine() {
    const ncclNDTensor_t* inputs[] = {&expert_outputs};
    ncclNDTensor_t* outputs[] = {&combined};
    ncclNDTensor_t* locals[] = {&weights_};
    const bool weighs = options_.low_latency() && !options_.by_rank;
    EP_REQUIRE_NCCL(ncclEpCombine(handle_, inputs, 1, outputs, 1, locals, weighs ? 1 : 0, 0, nullptr, env_->stream));
}

Calls Session::MakeCalls() {
    Calls calls = {[this] { CallDispatch(); }, [this] { CallCombine(); }, [this] { CallComplete(); }};
    if (options_.rows.casts_outside()) calls.call_cast = [this] { CallCast(); };
    return calls;
}

void Session::CastAndDispatch() {
    if (options_.rows.casts_outside()) CallCast();
    Dispatch();
}

void Session::Dispatch() { MakeCalls().Dispatch(); }

void Session::Combine() { MakeCalls().Combine(); }

void Session::CallComplete() { EP_REQUIRE_NCCL(ncclEpComplete(handle_, nullptr, env_->stream)); }

}  // namespace ep_bench

// Kernel parameters, explained in src/backend/cuda/params/common.rs, from which
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params makes this; do not edit.
// clang-format off

#pragma once

#include <cstddef>
#include <cstdint>

namespace nccl_ep {

constexpr static const size_t MAX_PEERS = 72;
constexpr static const size_t SELFTEST_SLOT_BYTES = 4096;
constexpr static const uint32_t SELFTEST_THREADS = 128;
constexpr static const uint32_t REPLAY_MARK_THREADS = 32;
constexpr static const uint32_t HANDLE_HEADER_THREADS = 32;
constexpr static const size_t HANDLE_HEADER_WORDS = 20;
constexpr static const uint32_t HANDLE_HEADER_COMPARED = 16;
constexpr static const size_t HANDLE_HEADER_ROWS = 18;
constexpr static const uint32_t SELFTEST_MISSING = 0;
constexpr static const uint32_t SELFTEST_PASSED = 1;
constexpr static const uint32_t SELFTEST_MISMATCH = 2;
constexpr static const uint32_t SELFTEST_TIMEOUT = 3;
constexpr static const uint32_t OWN_NODE_FIRST = 4294967295;

enum Scales : uint32_t {
    SCALES_FORWARDED = 0,
    SCALES_FLOAT = 1,
    SCALES_POWER_OF_TWO = 2,
    SCALES_EXPONENT = 3,
};

enum KernelOp : uint32_t {
    KERNEL_OP_PEER_SELFTEST = 1,
    KERNEL_OP_LL_DISPATCH = 2,
    KERNEL_OP_LL_COMBINE = 3,
    KERNEL_OP_HT_ROUTE = 4,
    KERNEL_OP_HT_DISPATCH = 5,
    KERNEL_OP_HT_COMBINE = 6,
};

enum Fault : uint32_t {
    FAULT_NONE = 0,
    FAULT_TIMEOUT = 1,
    FAULT_DIFFERS = 2,
    FAULT_SHAPE_DIFFERS = 3,
    FAULT_PEER_FAILED = 4,
    FAULT_TOKEN_ROWS = 5,
    FAULT_ROUTING_ROWS = 6,
    FAULT_INPUT_ROWS = 7,
    FAULT_DISAGREED = 8,
    FAULT_STAGED_DIFFERS = 9,
    FAULT_HANDLE_DIFFERS = 10,
    FAULT_RAIL_PEER_FAILED = 11,
    FAULT_SCALE_ROWS = 12,
    FAULT_EXPERT_ROWS = 13,
    FAULT_FOREIGN_STATE = 14,
};

enum Wait : uint32_t {
    WAIT_PATTERN = 0,
    WAIT_COUNTS = 1,
    WAIT_ENTRY = 2,
    WAIT_ROW = 3,
    WAIT_WEIGHT = 4,
    WAIT_BEGIN = 5,
    WAIT_ACK = 6,
    WAIT_CREDIT = 7,
    WAIT_STREAMED_ROW = 8,
};

struct FaultReport {
    uint32_t state;
    uint32_t op;
    uint32_t what;
    uint32_t peer;
    uint32_t expected;
    uint32_t got;
    uint32_t waited_ms;
    uint32_t expected_scales;
    uint32_t got_scales;
};

struct ScaleView {
    uint8_t *data;
    uint64_t expert;
    uint64_t row;
    uint64_t column;
};

struct ScaledRows {
    uint32_t payload_bytes;
    uint32_t scale_bytes;
    uint32_t scale_width;
    Scales form;
    uint32_t block;
    uint32_t scale_chunk_bytes;
    ScaleView from;
    ScaleView out;
};

struct WaitParams {
    uint64_t timeout_ns;
    FaultReport *report;
    uint32_t *failed;
    uint32_t *peer_failed;
    KernelOp op;
};

struct PeerTable {
    uint8_t *window[MAX_PEERS];
    uint32_t ranks;
    uint32_t rank;
};

struct RankOnNode {
    int32_t peer;
    uint32_t forwarder;
    uint32_t number;
    uint32_t distance;
};

struct MessageHeader {
    uint32_t handle;
    uint32_t tokens;
    uint32_t fingerprint;
    uint32_t channel;
    uint32_t scales_word;
    uint32_t epoch;
    uint32_t pass;
    uint32_t failed;
};

struct SelftestResult {
    uint32_t outcome;
    uint32_t wrong_threads;
};

struct ReplayMarkParams {
    uint64_t *place;
    uint32_t begins;
};

struct HandleHeaderParams {
    PeerTable peers;
    WaitParams wait;
    uint32_t *header;
    uint32_t words[HANDLE_HEADER_WORDS];
    uint32_t writes;
    const uint32_t *rows;
};

struct PeerSelftestParams {
    PeerTable peers;
    WaitParams wait;
    uint64_t flags_offset;
    uint64_t slots_offset;
    SelftestResult *results;
    uint32_t epoch;
};

}  // namespace nccl_ep

static_assert(sizeof(nccl_ep::FaultReport) == 36, "FaultReport as in Rust");
static_assert(sizeof(nccl_ep::ScaleView) == 32, "ScaleView as in Rust");
static_assert(sizeof(nccl_ep::ScaledRows) == 88, "ScaledRows as in Rust");
static_assert(sizeof(nccl_ep::WaitParams) == 40, "WaitParams as in Rust");
static_assert(sizeof(nccl_ep::PeerTable) == 584, "PeerTable as in Rust");
static_assert(sizeof(nccl_ep::RankOnNode) == 16, "RankOnNode as in Rust");
static_assert(sizeof(nccl_ep::MessageHeader) == 32, "MessageHeader as in Rust");
static_assert(sizeof(nccl_ep::SelftestResult) == 8, "SelftestResult as in Rust");
static_assert(sizeof(nccl_ep::ReplayMarkParams) == 16, "ReplayMarkParams as in Rust");
static_assert(sizeof(nccl_ep::HandleHeaderParams) == 728, "HandleHeaderParams as in Rust");
static_assert(sizeof(nccl_ep::PeerSelftestParams) == 656, "PeerSelftestParams as in Rust");

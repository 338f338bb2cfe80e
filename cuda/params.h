// What each kernel is told. Generated from src/backend/cuda/params.rs by
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params; do not edit.
// clang-format off

#pragma once

#include <cstddef>
#include <cstdint>

namespace nccl_ep {

/// Most ranks of a group: the GPUs of the largest NVLink domain.
constexpr static const size_t MAX_PEERS = 72;

/// Bytes that a rank sends to each peer in the self test.
constexpr static const size_t SELFTEST_SLOT_BYTES = 4096;

/// Threads per block of `peer_selftest`; its grid has one block per rank.
constexpr static const uint32_t SELFTEST_THREADS = 128;

/// `SelftestResult::outcome` of a block that did not end.
constexpr static const uint32_t SELFTEST_MISSING = 0;

/// `SelftestResult::outcome`: everything arrived as it was sent.
constexpr static const uint32_t SELFTEST_PASSED = 1;

/// `SelftestResult::outcome`: the flag arrived, but not the data that it announced.
constexpr static const uint32_t SELFTEST_MISMATCH = 2;

/// `SelftestResult::outcome`: no flag within the deadline.
constexpr static const uint32_t SELFTEST_TIMEOUT = 3;

/// `FaultReport::state` while nothing has failed.
constexpr static const uint32_t FAULT_NONE = 0;

/// `FaultReport::state` once all other fields are valid.
constexpr static const uint32_t FAULT_RECORDED = 1;

/// `FaultReport::op` of the self test.
constexpr static const uint32_t OP_PEER_SELFTEST = 1;

/// The first wait of a group that reached its deadline. Lives in host memory that the device maps;
/// the kernel writes `state` last.
struct FaultReport {
    /// `FAULT_NONE` or `FAULT_RECORDED`.
    uint32_t state;
    /// Which kernel waited, `OP_...`.
    uint32_t op;
    /// The rank that was waited for.
    uint32_t peer;
    /// The epoch that should have arrived.
    uint32_t expected;
    /// The epoch that had arrived.
    uint32_t got;
};

/// What every wait on the device needs.
struct WaitParams {
    /// How long one wait may last.
    uint64_t timeout_ns;
    /// Where the first failure of the group is described.
    FaultReport *report;
    /// Device memory; not zero once some wait of the group has failed, so that others give up.
    uint32_t *failed;
    /// Who waits, `OP_...`.
    uint32_t op;
};

/// The windows of all ranks, as this rank maps them.
struct PeerTable {
    /// First byte of each rank's window; this rank's own included.
    uint8_t *window[MAX_PEERS];
    /// Number of ranks.
    uint32_t ranks;
    /// This rank.
    uint32_t rank;
};

/// What one rank found out about one peer.
struct SelftestResult {
    /// `SELFTEST_...`.
    uint32_t outcome;
    /// Threads that saw a wrong value.
    uint32_t wrong_threads;
};

/// Parameters of `peer_selftest`.
struct PeerSelftestParams {
    /// Where the ranks' windows are.
    PeerTable peers;
    /// Deadline and report.
    WaitParams wait;
    /// Offset in a window: one u32 arrival flag per source rank.
    uint64_t flags_offset;
    /// Offset in a window: one slot of `SELFTEST_SLOT_BYTES` per source rank.
    uint64_t slots_offset;
    /// One result per rank, in host memory that the device maps.
    SelftestResult *results;
    /// The value of a flag that announces this run's data.
    uint32_t epoch;
};

}  // namespace nccl_ep

static_assert(sizeof(nccl_ep::FaultReport) == 20, "FaultReport as in Rust");
static_assert(sizeof(nccl_ep::WaitParams) == 32, "WaitParams as in Rust");
static_assert(sizeof(nccl_ep::PeerTable) == 584, "PeerTable as in Rust");
static_assert(sizeof(nccl_ep::SelftestResult) == 8, "SelftestResult as in Rust");
static_assert(sizeof(nccl_ep::PeerSelftestParams) == 648, "PeerSelftestParams as in Rust");

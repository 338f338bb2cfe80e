//! What each kernel is told: one `#[repr(C)]` struct per kernel, defined here and nowhere else.
//!
//! `cuda/params.h` is generated from this file (`tests/kernel_params.rs`), so it must stay free of
//! other modules. Addresses are the device's; the host never follows them through these structs.
#![forbid(unsafe_code)]

/// Most ranks of a group: the GPUs of the largest NVLink domain.
pub const MAX_PEERS: usize = 72;

/// Bytes that a rank sends to each peer in the self test.
pub const SELFTEST_SLOT_BYTES: usize = 4096;

/// Threads per block of `peer_selftest`; its grid has one block per rank.
pub const SELFTEST_THREADS: u32 = 128;

/// `SelftestResult::outcome` of a block that did not end.
pub const SELFTEST_MISSING: u32 = 0;
/// `SelftestResult::outcome`: everything arrived as it was sent.
pub const SELFTEST_PASSED: u32 = 1;
/// `SelftestResult::outcome`: the flag arrived, but not the data that it announced.
pub const SELFTEST_MISMATCH: u32 = 2;
/// `SelftestResult::outcome`: no flag within the deadline.
pub const SELFTEST_TIMEOUT: u32 = 3;

/// `FaultReport::state` while nothing has failed.
pub const FAULT_NONE: u32 = 0;
/// `FaultReport::state` once all other fields are valid.
pub const FAULT_RECORDED: u32 = 1;

/// `FaultReport::op` of the self test.
pub const OP_PEER_SELFTEST: u32 = 1;

/// The first wait of a group that reached its deadline. Lives in host memory that the device maps;
/// the kernel writes `state` last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct FaultReport {
    /// `FAULT_NONE` or `FAULT_RECORDED`.
    pub state: u32,
    /// Which kernel waited, `OP_...`.
    pub op: u32,
    /// The rank that was waited for.
    pub peer: u32,
    /// The epoch that should have arrived.
    pub expected: u32,
    /// The epoch that had arrived.
    pub got: u32,
}

/// What every wait on the device needs.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WaitParams {
    /// How long one wait may last.
    pub timeout_ns: u64,
    /// Where the first failure of the group is described.
    pub report: *mut FaultReport,
    /// Device memory; not zero once some wait of the group has failed, so that others give up.
    pub failed: *mut u32,
    /// Who waits, `OP_...`.
    pub op: u32,
}

/// The windows of all ranks, as this rank maps them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PeerTable {
    /// First byte of each rank's window; this rank's own included.
    pub window: [*mut u8; MAX_PEERS],
    /// Number of ranks.
    pub ranks: u32,
    /// This rank.
    pub rank: u32,
}

/// What one rank found out about one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct SelftestResult {
    /// `SELFTEST_...`.
    pub outcome: u32,
    /// Threads that saw a wrong value.
    pub wrong_threads: u32,
}

/// Parameters of `peer_selftest`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PeerSelftestParams {
    /// Where the ranks' windows are.
    pub peers: PeerTable,
    /// Deadline and report.
    pub wait: WaitParams,
    /// Offset in a window: one u32 arrival flag per source rank.
    pub flags_offset: u64,
    /// Offset in a window: one slot of `SELFTEST_SLOT_BYTES` per source rank.
    pub slots_offset: u64,
    /// One result per rank, in host memory that the device maps.
    pub results: *mut SelftestResult,
    /// The value of a flag that announces this run's data.
    pub epoch: u32,
}

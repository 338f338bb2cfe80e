//! The layout of a rank's window.

use crate::backend::cuda::params::common::SELFTEST_SLOT_BYTES;
use crate::backend::cuda::peer::teardown::WORD_BYTES;
use crate::model::regions::Regions;

/// Regions start on a cache line of their own, so that polling one does not disturb another.
const REGION_ALIGN: usize = 128;

/// Windows are multiples of this. The driver then gives a window pages of its own; otherwise an exported handle would
/// expose other allocations on them to the peers.
const WINDOW_ALIGN: usize = 2 << 20;

/// Offsets of the regions of a window, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLayout {
    /// u32: 1 + the failed peer, written by that peer.
    pub peer_failed: usize,
    /// `teardown::WORD_BYTES` per source rank.
    pub teardown: usize,
    /// u32 per source rank: arrival flags of the self test.
    pub selftest_flags: usize,
    /// `SELFTEST_SLOT_BYTES` per source rank.
    pub selftest_slots: usize,
    /// The operations' region; `LlPlan` and `HtPlan` know its layout.
    pub operations: usize,
    pub bytes: usize,
}

impl WindowLayout {
    /// The layout for a group of `ranks` whose operations use `operation_bytes`.
    pub fn new(ranks: usize, operation_bytes: usize) -> Self {
        let mut window = Regions::new(REGION_ALIGN);
        let peer_failed = window.take(size_of::<u32>());
        let teardown = window.take(ranks * WORD_BYTES);
        let selftest_flags = window.take(ranks * size_of::<u32>());
        let selftest_slots = window.take(ranks * SELFTEST_SLOT_BYTES);
        let operations = window.take(operation_bytes);
        Self {
            peer_failed,
            teardown,
            selftest_flags,
            selftest_slots,
            operations,
            bytes: window.bytes().next_multiple_of(WINDOW_ALIGN),
        }
    }
}

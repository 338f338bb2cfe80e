//! The layout of a rank's window.

use crate::backend::cuda::params::common::SELFTEST_SLOT_BYTES;
use crate::backend::cuda::peer::teardown::WORD_BYTES;
use crate::model::regions::Regions;

/// Regions begin on their own cache lines, so that polling one does not slow down another.
const REGION_ALIGN: usize = 128;

/// Windows are multiples of this size, for which the driver allocates separate pages. Otherwise an exported handle
/// would let peers access other allocations on the same page.
const WINDOW_ALIGN: usize = 2 << 20;

/// Offsets of the regions of a window; the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLayout {
    /// u32: 1 + the number of a failed peer, written by that peer.
    pub peer_failed: usize,
    /// `teardown::WORD_BYTES` per source rank.
    pub teardown: usize,
    /// u32 per source rank: arrival flags of the self test.
    pub selftest_flags: usize,
    /// `SELFTEST_SLOT_BYTES` per source rank.
    pub selftest_slots: usize,
    /// The region of operations, whose layout is in `LlPlan` and `HtPlan`.
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

//! Regions of windows beside the rings: for operations with offers, and for what accompanies rows that need no ring.

use crate::backend::cuda::params::ht_mapped::{HT_OFFER_PACKETS, HtMappedLayout};
use crate::model::group::{GroupFacts, ROW_ALIGN};
use crate::model::regions::Regions;

const PACKET_BYTES: usize = 8;
/// Room for ids and weights beside a row: for eight experts. Operations that need more use the rings.
const ENTRIES_BYTES: usize = 8 * 8;
/// Room for scales, as a share of the group's bound on rows.
const SCALES_OF_BOUND: usize = 64;
/// Limit on everything beside rows.
const MOST_BYTES: usize = 16 << 20;

/// The regions of a group on one node.
pub fn regions(facts: &GroupFacts, max_tokens: usize, window: &mut Regions) -> HtMappedLayout {
    let ranks = facts.ranks;
    let offers = window.take(2 * ranks * HT_OFFER_PACKETS as usize * PACKET_BYTES);
    let done = window.take(ranks * PACKET_BYTES);
    let of_row = ENTRIES_BYTES + facts.row_bytes.div_ceil(SCALES_OF_BOUND);
    let wanted = max_tokens.saturating_mul(of_row.next_multiple_of(ROW_ALIGN));
    let side_bytes = wanted.min(MOST_BYTES / (ranks - 1)) / ROW_ALIGN * ROW_ALIGN;
    HtMappedLayout {
        offers: offers as u64,
        done: done as u64,
        side: window.take((ranks - 1) * side_bytes) as u64,
        side_bytes: side_bytes as u64,
    }
}

/// The same regions in windows where the group's begins at `start`.
pub fn at(regions: &HtMappedLayout, start: u64) -> HtMappedLayout {
    HtMappedLayout {
        offers: start + regions.offers,
        done: start + regions.done,
        side: start + regions.side,
        side_bytes: regions.side_bytes,
    }
}

//! The window's regions outside the rings: for offers, and for ids, weights and scales of rows that bypass the rings.

use crate::backend::cuda::params::ht_mapped::{HT_OFFER_PACKETS, HtMappedLayout};
use crate::model::group::{GroupFacts, ROW_ALIGN};
use crate::model::regions::Regions;

const PACKET_BYTES: usize = 8;
/// Bytes for a row's ids and weights, enough for eight experts. Operations that need more use the rings.
const ENTRIES_BYTES: usize = 8 * 8;
/// The share of the group's bound on rows that is reserved for a row's scales.
const SCALES_OF_BOUND: usize = 64;
/// Limit on the bytes of ids, weights and scales together.
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

/// `regions` in windows in which the group's region begins at `start`.
pub fn at(regions: &HtMappedLayout, start: u64) -> HtMappedLayout {
    HtMappedLayout {
        offers: start + regions.offers,
        done: start + regions.done,
        side: start + regions.side,
        side_bytes: regions.side_bytes,
    }
}

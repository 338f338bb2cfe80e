//! The grid of an HT operation: numbers of blocks, of warps, and of blocks that send.
//!
//! Ranks may use different grids: each row is announced by itself, so no rank needs to know how many
//! blocks of another rank send or receive.

use crate::backend::cuda::params::ht::{HT_COMBINE_THREADS, HT_DISPATCH_THREADS, HT_STATIC_SHARED_BYTES};
use crate::model::group::GroupFacts;
use crate::model::ops::{HtCombine, HtDispatch, Launch};
use crate::tuning::{Choice, Operation, Shapes, share};

pub const WARP: u32 = 32;
const COMBINE: HtKind = HtKind::Combine { columns: 0 };

/// Default number of blocks; the numbers of senders below refer to it.
const AUTO_BLOCKS: u32 = 24;
const DISPATCH_SENDERS: u32 = 8;
/// Senders with two ranks; for three a guess.
const DISPATCH_SENDERS_OF_FEW: u32 = 9;
const COMBINE_SENDERS: u32 = 9;
/// Senders from four ranks on with fewer than 24 blocks: the share that balances sending with storing or summing, up to
/// the numbers above, which saturate NVLink.
const BALANCED_DISPATCH_SENDERS: u32 = 11;
const BALANCED_COMBINE_SENDERS: u32 = 14;
/// Up to this many blocks, only as many send as saturate NVLink: in a dispatch as many as of 24 blocks, in a combine of
/// few ranks one more. Additional ones would send faster than the other blocks store or sum.
const PACED_DISPATCH_BLOCKS: u32 = 63;
const PACED_COMBINE_BLOCKS: u32 = 47;
const PACED_COMBINE_SENDERS: u32 = 10;
/// Senders of combines of more than four ranks with many blocks: a guess.
const COMBINE_SENDERS_OF_MANY: u32 = 11;
const MANY_BLOCKS: u32 = 96;
/// With four ranks, more blocks than this make a dispatch of many tokens slower.
const BLOCKS_OF_FOUR: u32 = 32;
const TOKENS_OF_FOUR: usize = 2048;
/// Up to this many blocks, each block of a combine sends with some of its warps and receives with the rest: with two
/// ranks (for three a guess) or short rows, and from four ranks on with long rows.
const MIXED_BLOCKS: u32 = 24;
const MIXED_BLOCKS_OF_LONG_ROWS: u32 = 16;
/// The warps that send then: with two ranks, with two where lanes poll several slots at once, and from four on.
const SEND_WARPS_OF_FEW: SendWarps = SendWarps { always: 1, bytes: 28 << 10, least: 2, most: 7 };
const SEND_WARPS_OF_FEW_SHORT: SendWarps = SendWarps { always: 0, bytes: 27 << 10, ..SEND_WARPS_OF_FEW };
const SEND_WARPS: SendWarps = SendWarps { always: 6, bytes: 11 << 10, least: 7, most: 9 };
/// Rows are short if those in a slot, without tails, have at most so many bytes: in combines of two ranks, in those of
/// four and more, and in dispatches.
const SHORT_BYTES_OF_FEW: usize = 8 << 10;
const SHORT_BYTES: usize = 6 << 10;
const SHORT_BYTES_OF_DISPATCH: usize = 4 << 10;
/// Clock cycles that a sending warp pauses between polls for credit, from four ranks on: without a pause blocks run
/// ahead of their receivers. With two ranks a pause makes combines slower.
const DISPATCH_PAUSE: u32 = 512;
const COMBINE_PAUSE: u32 = 320;
/// The share of senders in a dispatch that casts: per row, a sender takes three times as long as a receiver.
const CAST_BLOCKS: u32 = 18;
const CAST_SENDERS: u32 = 13;
/// Of `CAST_BLOCKS`, from four ranks on: fewer, as more rows arrive.
const CAST_SENDERS_OF_FOUR: u32 = 10;
/// More senders that cast gain nothing.
const MOST_CAST_SENDERS: u32 = 50;
/// Rows by expert: the costs of sending a row in a dispatch, first with few blocks that store, then with so many that
/// memory limits them, and of sending a sum in a combine. The unit is the cost of storing or reading a slot.
const ROW_SENT: f64 = 1.6;
const ROW_SENT_OF_MANY: f64 = 2.8;
const SUM_SENT: f64 = 0.6;
/// A sending block needs a warp that copies and one that notifies.
const LEAST_WARPS: u32 = 2;

/// The two operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HtKind {
    /// `forward`: ids and weights travel with the rows.
    Dispatch { forward: bool },
    /// `columns`: gradients that travel with each row.
    Combine { columns: usize },
}

impl From<&HtDispatch> for HtKind {
    fn from(op: &HtDispatch) -> Self {
        let forward = op.routing_in.is_some();
        Self::Dispatch { forward }
    }
}

impl From<&HtCombine> for HtKind {
    fn from(op: &HtCombine) -> Self {
        let columns = op.gradients.map_or(0, |gradients| gradients.top_k);
        Self::Combine { columns }
    }
}

impl HtKind {
    /// The most threads per block.
    fn most_threads(self) -> u32 {
        match self {
            Self::Dispatch { .. } => HT_DISPATCH_THREADS,
            Self::Combine { .. } => HT_COMBINE_THREADS,
        }
    }

    fn operation(self) -> Operation {
        match self {
            Self::Dispatch { .. } => Operation::HtDispatch,
            Self::Combine { .. } => Operation::HtCombine,
        }
    }

    /// Clock cycles that a sending warp pauses between polls for credit; for three ranks a guess.
    pub fn sender_pause(self, ranks: usize) -> u32 {
        match (ranks, self) {
            (..4, _) => 0,
            (_, Self::Dispatch { .. }) => DISPATCH_PAUSE,
            (_, Self::Combine { .. }) => COMBINE_PAUSE,
        }
    }

    /// The library's own choice for `blocks`, if no tuning file has one.
    fn own_choice(self, ranks: usize, blocks: u32) -> Choice {
        let (senders, balanced) = match (self, ranks) {
            (Self::Dispatch { .. }, ..=3) => (DISPATCH_SENDERS_OF_FEW, DISPATCH_SENDERS_OF_FEW),
            (Self::Dispatch { .. }, _) => (DISPATCH_SENDERS, BALANCED_DISPATCH_SENDERS),
            (Self::Combine { .. }, ..=3) => (COMBINE_SENDERS, COMBINE_SENDERS),
            (Self::Combine { .. }, 5..) if blocks >= MANY_BLOCKS => (COMBINE_SENDERS_OF_MANY, COMBINE_SENDERS_OF_MANY),
            (Self::Combine { .. }, _) => (COMBINE_SENDERS, BALANCED_COMBINE_SENDERS),
        };
        let paced = match (self, ranks) {
            (Self::Dispatch { .. }, _) if blocks <= PACED_DISPATCH_BLOCKS => senders,
            (Self::Combine { .. }, ..=3) if blocks <= PACED_COMBINE_BLOCKS => PACED_COMBINE_SENDERS,
            _ => u32::MAX,
        };
        let of = |part| share(blocks, part, AUTO_BLOCKS);
        let send_blocks = of(senders).max(of(balanced).min(senders)).min(paced);
        Choice { blocks, threads: self.most_threads(), send_blocks }
    }
}

/// The device's limits on launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    pub multiprocessors: u32,
    /// Most shared memory of a block.
    pub shared_bytes: u32,
}

impl DeviceLimits {
    /// Most dynamic shared memory of a kernel's block.
    pub fn dynamic_shared_bytes(&self) -> u32 {
        self.shared_bytes.saturating_sub(HT_STATIC_SHARED_BYTES)
    }
}

/// The caller's bound on a kernel's blocks, two per channel; `None` if the library chooses.
pub fn granted_blocks(facts: &GroupFacts) -> Option<u32> {
    let blocks = |channels: usize| u32::try_from(2 * channels).unwrap_or(u32::MAX);
    facts.channels.map(blocks)
}

/// The blocks of operations on rows by expert. By default one per SM, as a rank stores or sums several times as many
/// bytes as cross NVLink.
pub fn blocks_of_zones(facts: &GroupFacts, device: DeviceLimits) -> u32 {
    granted_blocks(facts).unwrap_or(u32::MAX).min(device.multiprocessors).max(2)
}

/// How many warps of a block send: some `always`, and others for so many `bytes` of rows, as short rows need more of
/// them in flight.
struct SendWarps {
    always: usize,
    bytes: usize,
    least: usize,
    most: usize,
}

impl SendWarps {
    fn of(self, row_bytes: usize) -> u32 {
        let rows = (self.bytes + row_bytes / 2) / row_bytes.max(1);
        (self.always + rows).clamp(self.least, self.most) as u32
    }
}

/// The grid of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub blocks: u32,
    /// The first blocks send, the rest receive; 0 if there is no rank to send to.
    pub send_blocks: u32,
    /// The most warps of a block.
    pub warps: u32,
    /// Blocks of an operation that casts, which gets faster with every block.
    cast_blocks: u32,
    /// Whether `send_warps` may replace `send_blocks`.
    mixes: bool,
}

impl Grid {
    /// The grid of an operation on this rank's `tokens`: that of the tuning file if it has one, else the library's
    /// choice; within the caller's bound. With four ranks more blocks get slower, unless there are zones: 24, 32 and
    /// 132 take 492, 528 and 510 us in a combine, 498, 494 and 515 in a dispatch.
    pub fn new(facts: &GroupFacts, shapes: &Shapes, kind: HtKind, tokens: usize, device: DeviceLimits) -> Self {
        // A rank without tokens may still receive many rows.
        let work = if tokens == 0 { facts.max_tokens } else { Some(tokens) };
        let measured = work.and_then(|work| shapes.choice(kind.operation(), work));
        let granted = granted_blocks(facts);
        let wanted = match (measured, granted) {
            (Some(choice), Some(granted)) => choice.blocks.min(granted),
            (Some(choice), None) => choice.blocks,
            (None, granted) => granted.unwrap_or(AUTO_BLOCKS),
        };
        let fastest = match kind {
            _ if facts.ranks != 4 || facts.zones || measured.is_some() => u32::MAX,
            HtKind::Combine { .. } => AUTO_BLOCKS,
            HtKind::Dispatch { .. } if tokens >= TOKENS_OF_FOUR => BLOCKS_OF_FOUR,
            HtKind::Dispatch { .. } => u32::MAX,
        };
        let cast_blocks = wanted.min(device.multiprocessors).max(2);
        let blocks = cast_blocks.min(fastest);
        let own = kind.own_choice(facts.ranks, blocks);
        let choice = measured.unwrap_or(own);
        let send_blocks = match facts.ranks {
            1 => 0,
            _ => share(blocks, choice.send_blocks, choice.blocks).clamp(1, blocks - 1),
        };
        let mixes = matches!(kind, HtKind::Combine { .. }) && measured.is_none();
        let warps = (choice.threads.min(own.threads) / WARP).max(LEAST_WARPS);
        Self { blocks, send_blocks, warps, cast_blocks, mixes }
    }

    /// The grid of `blocks` for an operation on rows by expert, for tokens with `top_k` experts each. Tuning files do
    /// not apply, as they are measured with flat rows.
    pub fn of_zones(facts: &GroupFacts, kind: HtKind, top_k: usize, blocks: u32) -> Self {
        let (ranks, slots) = (facts.ranks as f64, top_k as f64);
        // Per token: rows on all ranks, and rows that are sent.
        let rows = ranks * (1.0 - (1.0 - 1.0 / ranks).powf(slots));
        let sent = rows * (1.0 - 1.0 / ranks);
        let row_sent = if blocks < MANY_BLOCKS { ROW_SENT } else { ROW_SENT_OF_MANY };
        let (sends, receives) = match kind {
            HtKind::Dispatch { .. } => (row_sent * sent, slots),
            HtKind::Combine { .. } => (slots - slots / ranks + SUM_SENT * sent, slots / ranks + sent + 1.0),
        };
        let senders = (f64::from(blocks) * sends / (sends + receives)).round() as u32;
        Self {
            blocks,
            send_blocks: match facts.ranks {
                1 => 0,
                _ => senders.clamp(1, blocks - 1),
            },
            warps: kind.most_threads() / WARP,
            cast_blocks: blocks,
            mixes: false,
        }
    }

    /// This grid as changed by a call's `launch` options.
    pub fn adjusted(self, launch: Launch, kind: HtKind) -> Self {
        if launch.is_own() {
            return self;
        }
        let blocks = match launch.blocks {
            0 => self.blocks,
            blocks => blocks.max(2),
        };
        let senders = match launch.send_blocks {
            0 => share(blocks, self.send_blocks, self.blocks),
            senders => senders,
        };
        Self {
            blocks,
            send_blocks: match self.send_blocks {
                0 => 0,
                _ => senders.clamp(1, blocks - 1),
            },
            warps: match launch.threads {
                0 => self.warps,
                threads => (threads.min(kind.most_threads()) / WARP).max(LEAST_WARPS),
            },
            cast_blocks: self.cast_blocks,
            mixes: self.mixes && launch.send_blocks == 0 && launch.threads == 0,
        }
    }

    /// How many warps of each block send rows of `row_bytes` while the rest receives; `None` if whole blocks send
    /// instead.
    pub fn send_warps(&self, ranks: usize, row_bytes: usize) -> Option<u32> {
        let few = ranks < 4;
        let most_blocks = if few || row_bytes <= SHORT_BYTES { MIXED_BLOCKS } else { MIXED_BLOCKS_OF_LONG_ROWS };
        if !self.mixes || ranks < 2 || self.blocks > most_blocks {
            return None;
        }
        let warps = match few {
            true if self.polls_several(COMBINE, ranks, row_bytes) => SEND_WARPS_OF_FEW_SHORT,
            true => SEND_WARPS_OF_FEW,
            false => SEND_WARPS,
        };
        Some(warps.of(row_bytes))
    }

    /// Whether lanes poll several slots at once for credits, each with `slot_bytes` of rows: where rows are short, as
    /// every block has to pass all slots. For longer rows, and with many senders of a dispatch, that brings bursts, and
    /// combines of few ranks and blocks gain nothing. Rows by expert have not been measured.
    pub fn polls_several(&self, kind: HtKind, ranks: usize, slot_bytes: usize) -> bool {
        let most = match (kind, ranks) {
            (HtKind::Dispatch { .. }, _) if self.blocks <= MIXED_BLOCKS => SHORT_BYTES_OF_DISPATCH,
            (HtKind::Combine { .. }, 4..) => SHORT_BYTES,
            (HtKind::Combine { .. }, _) if self.blocks > MIXED_BLOCKS_OF_LONG_ROWS => SHORT_BYTES_OF_FEW,
            _ => 0,
        };
        slot_bytes <= most
    }

    /// This grid for a dispatch that casts: senders also cast the rows that stay on this rank. Tuning files do not
    /// apply, as they are measured without casts.
    pub fn of_casts(self, ranks: usize) -> Self {
        let part = if ranks < 4 { CAST_SENDERS } else { CAST_SENDERS_OF_FOUR };
        let blocks = self.cast_blocks;
        // Rounded to nearest.
        let senders = (blocks * part + CAST_BLOCKS / 2) / CAST_BLOCKS;
        Self { blocks, send_blocks: senders.clamp(1, (blocks - 1).min(MOST_CAST_SENDERS)), ..self }
    }
}

#[cfg(test)]
#[path = "grid_tests.rs"]
mod tests;

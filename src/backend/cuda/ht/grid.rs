//! The grid of an HT operation: blocks, warps, and how many of the blocks send.
//!
//! Each rank decides for itself. Rows are announced one by one, so no rank needs to know how many
//! blocks of another send or receive.

use crate::backend::cuda::params::ht::{HT_COMBINE_THREADS, HT_DISPATCH_THREADS, HT_STATIC_SHARED_BYTES};
use crate::model::group::GroupFacts;
use crate::model::ops::{HtCombine, HtDispatch, Launch};
use crate::tuning::{Choice, Operation, Tuning, share};

pub const WARP: u32 = 32;

/// Default number of blocks. The numbers of senders below are per that many.
const AUTO_BLOCKS: u32 = 24;
const DISPATCH_SENDERS: u32 = 8;
/// With two ranks; a guess for three.
const DISPATCH_SENDERS_OF_FEW: u32 = 9;
const COMBINE_SENDERS: u32 = 9;
/// From four ranks on, when there are fewer than 24 blocks: the share of senders that balances sending with storing or
/// summing, up to the numbers above. Those fill NVLink, though a few blocks alone are slow.
const BALANCED_DISPATCH_SENDERS: u32 = 11;
const BALANCED_COMBINE_SENDERS: u32 = 14;
/// Up to this many blocks, the number of senders stays at what fills NVLink: in a dispatch that of 24 blocks, in a
/// combine of few ranks one more. Further ones would send faster than the other blocks store or sum.
const PACED_DISPATCH_BLOCKS: u32 = 63;
const PACED_COMBINE_BLOCKS: u32 = 47;
const PACED_COMBINE_SENDERS: u32 = 10;
/// A guess for combines of more than four ranks with many blocks.
const COMBINE_SENDERS_OF_MANY: u32 = 11;
const MANY_BLOCKS: u32 = 96;
/// Up to this many blocks of a combine, every block sends with so many of its warps and receives with the others: with
/// two ranks (a guess for three), and from four on.
const MIXED_BLOCKS_OF_FEW: u32 = 24;
const SEND_WARPS_OF_FEW: u32 = 3;
const MIXED_BLOCKS: u32 = 16;
const SEND_WARPS: u32 = 7;
/// Of this many blocks of a casting dispatch so many send: a sender takes three times as long per row as a receiver.
const CAST_BLOCKS: u32 = 18;
const CAST_SENDERS: u32 = 13;
/// From four ranks on, as more rows arrive.
const CAST_SENDERS_OF_FOUR: u32 = 10;
/// From 30 on, more of them gain nothing.
const MOST_CAST_SENDERS: u32 = 50;
/// Rows by expert: the cost of sending a row in a dispatch, with few blocks that store and with enough to wait for
/// memory, and of sending a sum in a combine, each in units of a slot stored or read.
const ROW_SENT: f64 = 1.6;
const ROW_SENT_OF_MANY: f64 = 2.8;
const SUM_SENT: f64 = 0.6;
/// A sending block needs one warp that copies and one that notifies.
const LEAST_WARPS: u32 = 2;

/// The two operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HtKind {
    /// `forward`: ids and weights travel with the rows.
    Dispatch { forward: bool },
    /// `columns`: gradients per row that travel along.
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

    /// A good choice for `blocks` where nothing was measured.
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

/// Limits of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    pub multiprocessors: u32,
    /// Shared memory of a block.
    pub shared_bytes: u32,
}

impl DeviceLimits {
    /// Most dynamic shared memory available to the kernels.
    pub fn dynamic_shared_bytes(&self) -> u32 {
        self.shared_bytes.saturating_sub(HT_STATIC_SHARED_BYTES)
    }
}

/// The blocks that the caller grants to a kernel: two per channel. `None`: the library chooses.
pub fn granted_blocks(facts: &GroupFacts) -> Option<u32> {
    let blocks = |channels: usize| u32::try_from(2 * channels).unwrap_or(u32::MAX);
    facts.channels.map(blocks)
}

/// The blocks of operations on rows by expert. If the library chooses, all SMs take part, as a rank stores or sums
/// several times what crosses NVLink.
pub fn blocks_of_zones(facts: &GroupFacts, device: DeviceLimits) -> u32 {
    granted_blocks(facts).unwrap_or(u32::MAX).min(device.multiprocessors).max(2)
}

/// The grid of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub blocks: u32,
    /// The first `send_blocks` send, the others receive; 0 if there is no rank to send to.
    pub send_blocks: u32,
    /// Most warps per block.
    pub warps: u32,
    /// Whether `send_warps` may take the place of `send_blocks`.
    mixes: bool,
}

impl Grid {
    /// The grid of an operation on this rank's `tokens`: the measured one if there is one, else the library's choice.
    /// Granted channels, two blocks each, are an upper limit. Combines of four ranks get slower with more than the
    /// library's own number, unless expert ranks sum zones: 24, 32 and 132 blocks take 492, 528 and 510 us.
    pub fn new(facts: &GroupFacts, tuning: &Tuning, kind: HtKind, tokens: usize, device: DeviceLimits) -> Self {
        // A rank without tokens may still receive many.
        let work = if tokens == 0 { facts.max_tokens } else { Some(tokens) };
        let measured = work.and_then(|work| tuning.choice(kind.operation(), work));
        let granted = granted_blocks(facts);
        let wanted = match (measured, granted) {
            (Some(choice), Some(granted)) => choice.blocks.min(granted),
            (Some(choice), None) => choice.blocks,
            (None, granted) => granted.unwrap_or(AUTO_BLOCKS),
        };
        let fastest = match kind {
            HtKind::Combine { .. } if facts.ranks == 4 && !facts.zones && measured.is_none() => AUTO_BLOCKS,
            _ => u32::MAX,
        };
        let blocks = wanted.min(fastest).min(device.multiprocessors).max(2);
        let own = kind.own_choice(facts.ranks, blocks);
        let choice = measured.unwrap_or(own);
        let send_blocks = match facts.ranks {
            1 => 0,
            _ => share(blocks, choice.send_blocks, choice.blocks).clamp(1, blocks - 1),
        };
        let mixes = matches!(kind, HtKind::Combine { .. }) && measured.is_none();
        Self { blocks, send_blocks, warps: (choice.threads.min(own.threads) / WARP).max(LEAST_WARPS), mixes }
    }

    /// The grid of `blocks` for an operation on rows by expert, for tokens with `top_k` experts each. Ignores
    /// measurements, which are of flat rows.
    pub fn of_zones(facts: &GroupFacts, kind: HtKind, top_k: usize, blocks: u32) -> Self {
        let (ranks, slots) = (facts.ranks as f64, top_k as f64);
        // Per token: rows on all ranks, and those that are sent.
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
            mixes: false,
        }
    }

    /// This grid with the changes that a call of this kind asks for.
    pub fn asked(self, launch: Launch, kind: HtKind) -> Self {
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
            mixes: self.mixes && launch.send_blocks == 0 && launch.threads == 0,
        }
    }

    /// How many warps of each block send while the others receive; `None`: `send_blocks` applies.
    pub fn send_warps(&self, ranks: usize) -> Option<u32> {
        match ranks {
            2..4 if self.mixes && self.blocks <= MIXED_BLOCKS_OF_FEW => Some(SEND_WARPS_OF_FEW),
            4.. if self.mixes && self.blocks <= MIXED_BLOCKS => Some(SEND_WARPS),
            _ => None,
        }
    }

    /// The grid if senders cast, including rows that stay on this rank. Ignores measurements, which are of rows sent as
    /// they are.
    pub fn of_casts(self, ranks: usize) -> Self {
        let part = if ranks < 4 { CAST_SENDERS } else { CAST_SENDERS_OF_FOUR };
        // Rounded to nearest.
        let senders = (self.blocks * part + CAST_BLOCKS / 2) / CAST_BLOCKS;
        Self { send_blocks: senders.clamp(1, (self.blocks - 1).min(MOST_CAST_SENDERS)), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::group::Algorithm;

    const H200: DeviceLimits = DeviceLimits { multiprocessors: 132, shared_bytes: 227 << 10 };
    const COMBINE: HtKind = HtKind::Combine { columns: 0 };
    const DISPATCH: HtKind = HtKind::Dispatch { forward: true };

    fn facts(ranks: usize, channels: Option<usize>) -> GroupFacts {
        GroupFacts {
            algorithm: Algorithm::HighThroughput,
            ranks,
            experts: 32 * ranks,
            max_tokens: Some(4096),
            row_bytes: 14_336,
            channels,
            ..GroupFacts::SAMPLE
        }
    }

    #[test]
    fn channels_are_two_blocks_each() {
        for (channels, blocks) in [(1, 2), (4, 8), (1000, 132)] {
            let facts = facts(8, Some(channels));
            let grid = Grid::new(&facts, &Tuning::default(), COMBINE, 64, H200);
            assert_eq!(grid.blocks, blocks);
            assert!(grid.send_blocks >= 1 && grid.send_blocks < blocks);
        }
        let own = Grid::new(&facts(4, None), &Tuning::default(), DISPATCH, 64, H200);
        assert_eq!((own.blocks, own.send_blocks, own.warps), (24, 8, 24));
        for (ranks, dispatch, combine) in [(2, 9, 9), (3, 9, 9), (4, 8, 9), (8, 8, 9)] {
            for (kind, senders) in [(DISPATCH, dispatch), (COMBINE, combine)] {
                let own = Grid::new(&facts(ranks, None), &Tuning::default(), kind, 64, H200);
                assert_eq!((own.blocks, own.send_blocks), (24, senders));
            }
        }
    }

    #[test]
    fn ranks_and_blocks_decide_how_many_send() {
        for (kind, ranks, channels, senders) in [
            (COMBINE, 2, 66, 49),
            (COMBINE, 4, 66, 9),
            (COMBINE, 8, 66, 60),
            (COMBINE, 8, 48, 44),
            (COMBINE, 4, 8, 9),
            (COMBINE, 4, 4, 4),
            (COMBINE, 2, 8, 6),
            (DISPATCH, 4, 8, 7),
            (DISPATCH, 4, 4, 3),
            (DISPATCH, 2, 8, 6),
            (DISPATCH, 2, 24, 9),
            (DISPATCH, 2, 32, 24),
            (DISPATCH, 4, 24, 8),
            (DISPATCH, 4, 48, 32),
            (COMBINE, 2, 16, 10),
            (COMBINE, 2, 24, 18),
        ] {
            let facts = facts(ranks, Some(channels));
            let grid = Grid::new(&facts, &Tuning::default(), kind, 64, H200);
            assert_eq!(grid.send_blocks, senders);
        }
    }

    #[test]
    fn rows_by_expert_have_fewer_senders_and_all_blocks() {
        for (channels, top_k, senders) in
            [(Some(8), 8, (3, 7)), (Some(12), 8, (4, 10)), (Some(12), 2, (9, 8)), (None, 8, (34, 57))]
        {
            let blocks = blocks_of_zones(&facts(2, channels), H200);
            let grid = |kind| Grid::of_zones(&facts(2, channels), kind, top_k, blocks);
            let (dispatch, combine) = (grid(DISPATCH), grid(COMBINE));
            assert_eq!((dispatch.send_blocks, combine.send_blocks), senders);
            assert_eq!(dispatch.blocks, channels.map_or(132, |channels| 2 * channels as u32));
        }
        assert_eq!(Grid::of_zones(&facts(1, None), COMBINE, 8, 132).send_blocks, 0);
    }

    #[test]
    fn casts_have_more_senders() {
        for (channels, of_two, of_four) in
            [(1, 1, 1), (4, 6, 4), (8, 12, 9), (12, 17, 13), (16, 23, 18), (1000, 50, 50)]
        {
            for (ranks, senders) in [(2, of_two), (4, of_four)] {
                let facts = facts(ranks, Some(channels));
                let grid = Grid::new(&facts, &Tuning::default(), DISPATCH, 64, H200);
                assert_eq!(grid.of_casts(ranks).send_blocks, senders);
            }
        }
        let alone = Grid::new(&facts(1, Some(12)), &Tuning::default(), DISPATCH, 64, H200);
        assert_eq!((alone.send_blocks, alone.of_casts(1).send_blocks), (0, 17));
    }

    #[test]
    fn a_measured_grid_goes_first_and_is_one_that_works() {
        let file = r#"{"format": "nccl_ep tuning", "version": 1, "gpu": "G", "ranks": 4, "entries": [
            {"operation": "ht_dispatch", "tokens": 1, "blocks": 1, "threads": 32, "send_blocks": 1},
            {"operation": "ht_dispatch", "tokens": 4096, "blocks": 40, "threads": 512, "send_blocks": 10},
            {"operation": "ht_combine", "tokens": 4096, "blocks": 20, "threads": 1024, "send_blocks": 20}]}"#;
        let tuning = Tuning::parse(file, "G", 4, 132).unwrap();
        let grid = |kind, tokens, channels| {
            let grid = Grid::new(&facts(4, channels), &tuning, kind, tokens, H200);
            (grid.blocks, grid.send_blocks, grid.warps)
        };
        assert_eq!(grid(DISPATCH, 1, None), (2, 1, 2));
        assert_eq!(grid(DISPATCH, 2000, None), (40, 10, 16));
        assert_eq!(grid(DISPATCH, 0, None), (40, 10, 16));
        assert_eq!(grid(DISPATCH, 2000, Some(8)), (16, 4, 16));
        assert_eq!(grid(DISPATCH, 2000, Some(100)), (40, 10, 16));
        assert_eq!(grid(COMBINE, 4096, None), (20, 19, 16));
        assert_eq!(grid(COMBINE, 4097, None), (24, 9, 16));
        let alone = Grid::new(&facts(1, None), &tuning, COMBINE, 4096, H200);
        assert_eq!((alone.blocks, alone.send_blocks), (20, 0));
    }

    #[test]
    fn a_call_says_what_it_wants() {
        let own = Grid::new(&facts(4, None), &Tuning::default(), DISPATCH, 64, H200);
        let asked = |grid: Grid, blocks, send_blocks, threads| {
            let launch = Launch { blocks, send_blocks, threads, ..Launch::default() };
            let grid = grid.asked(launch, DISPATCH);
            (grid.blocks, grid.send_blocks, grid.warps)
        };
        assert_eq!(asked(own, 0, 0, 0), (24, 8, 24));
        assert_eq!(asked(own, 12, 0, 0), (12, 4, 24));
        assert_eq!(asked(own, 16, 7, 1024), (16, 7, 24));
        assert_eq!(asked(own, 0, 132, 32), (24, 23, 2));
        assert_eq!(asked(own, 1, 1, 0), (2, 1, 24));
        assert_eq!(asked(own.of_casts(4), 12, 0, 0), (12, 6, 24));
        let combine = Grid::new(&facts(2, Some(8)), &Tuning::default(), COMBINE, 64, H200);
        let warps = |send_blocks, blocks| {
            combine.asked(Launch { blocks, send_blocks, ..Launch::default() }, COMBINE).send_warps(2)
        };
        assert_eq!((warps(0, 0), warps(0, 24), warps(0, 32), warps(6, 16)), (Some(3), Some(3), None, None));
        assert_eq!((own.send_warps(4), combine.send_warps(4), combine.send_warps(1)), (None, Some(7), None));
        let alone = Grid::new(&facts(1, None), &Tuning::default(), DISPATCH, 64, H200);
        assert_eq!(asked(alone, 16, 7, 0), (16, 0, 24));
    }
}

//! What is decided about LL kernels before they start: regions of the window, chunks of rows, grids.
//!
//! Pure functions of the group's facts and of an operation's shape.
#![forbid(unsafe_code)]

use crate::backend::cuda::ll::grid::{Grid, at_most};
use crate::backend::cuda::ll::signature;
use crate::backend::cuda::params::{
    LL_BANKS, LL_CHANNELS, LL_CHUNK_VECS, LL_COMBINE_THREADS, LL_COUNTS_BESIDE_EXPERTS,
    LL_DISPATCH_THREADS, LL_INDEX_BITS, LL_MAX_TOP_K, LlLayout, LlShape,
};
use crate::backend::cuda::sizes::{Regions, number};
use crate::error::refusal::{OfSettings, Setting, Subject};
use crate::error::{Error, Result};
use crate::model::group::{GroupFacts, LlCombineMode};
use crate::model::ops::{Routing, RowType};
use crate::tuning::{Operation, Tuning};

/// Most bytes of a chunk of a row: what the lanes of a warp hold at once.
const CHUNK_BYTES: usize = LL_CHUNK_VECS as usize * 32 * 16;
const PACKET_BYTES: usize = 8;
const REGION_ALIGN: usize = 256;

/// A rank with few tokens has at least half of the blocks that it would have with the most tokens, to serve
/// those of the others. With all of them small even batches take longer; with half uneven ones do, but still
/// less than even ones with the most tokens (docs/performance.md).
const SERVING_SHARE: u32 = 2;
/// Blocks of a combine with few tokens.
const LEAST_COMBINE_BLOCKS: usize = 8;
/// A dispatch block's routers, and a warp beside them that sends.
const DISPATCH_LEAST_THREADS: u32 = 5 * 32;
/// Of so many multiprocessors one sends the rows of a dispatch; more would not fill NVLink better.
const MULTIPROCESSORS_PER_SENDER: u32 = 4;
/// From this many tokens on, combine is faster with blocks that only receive.
const MANY_TOKENS: usize = 256;

/// Dynamic shared memory that a block may have without asking for more: 48 KiB less its own variables.
const MAX_SHARED_BYTES: usize = (48 << 10) - 1024;
/// Shared memory of a dispatch block per expert of the group.
const SHARED_BYTES_PER_EXPERT: usize = 8;

/// The plan of one group.
#[derive(Clone, Copy, Debug)]
pub struct LlPlan {
    facts: GroupFacts,
    max_tokens: usize,
    /// Offsets from the start of the LL region.
    layout: LlLayout,
    /// Bytes of rows at the start of each bank.
    rows_bytes: usize,
    bytes: usize,
    /// What was measured on this machine goes before the rules below.
    tuning: Tuning,
}

/// Bytes of a handle's device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandleSizes {
    pub expert_of: usize,
    pub row_of: usize,
    pub tokens_of: usize,
}

impl LlPlan {
    /// The plan for a group with a bound of tokens, as LL groups have.
    pub fn new(facts: &GroupFacts) -> Result<Self> {
        let max_tokens = facts
            .max_tokens
            .ok_or_else(|| Error::internal("an LL group without a bound"))?;
        check_limits(facts, max_tokens)?;
        let rows_per_token = match facts.ll_combine {
            LlCombineMode::Reduce => facts.ranks,
            LlCombineMode::Exact => facts.ranks.max(LL_MAX_TOP_K as usize),
        };
        let rows = rows_per_token * max_tokens;
        let most_chunks = chunks(facts.row_bytes);
        let mut bank = Regions::new(REGION_ALIGN);
        let rows_bytes = rows * facts.row_bytes;
        bank.take(rows_bytes);
        let flags = bank.take(rows * most_chunks * PACKET_BYTES);
        let per_rank = facts.local_experts() + LL_COUNTS_BESIDE_EXPERTS as usize;
        let counts = bank.take(facts.ranks * per_rank * PACKET_BYTES);
        let entries = bank.take(facts.ranks * max_tokens * LL_MAX_TOP_K as usize * PACKET_BYTES);
        let mut window = Regions::new(REGION_ALIGN);
        let acks = window.take(LL_CHANNELS as usize * facts.ranks * PACKET_BYTES);
        let banks = window.take(LL_BANKS as usize * bank.bytes());
        let layout = LlLayout {
            acks: acks as u64,
            banks: banks as u64,
            bank_bytes: bank.bytes() as u64,
            flags: flags as u64,
            counts: counts as u64,
            entries: entries as u64,
        };
        Ok(Self {
            facts: *facts,
            max_tokens,
            layout,
            rows_bytes,
            bytes: window.bytes(),
            tuning: Tuning::default(),
        })
    }

    /// The same plan with the grids that were measured on `gpu`, if there are any.
    pub fn tuned(self, gpu: &str, multiprocessors: u32) -> Self {
        let tuning = Tuning::for_group(gpu, self.facts.ranks, multiprocessors);
        Self { tuning, ..self }
    }

    /// Bytes of the LL region of a window.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The kernels' offsets when the LL region begins at `start` of the window.
    pub fn layout(&self, start: usize) -> LlLayout {
        let start = start as u64;
        LlLayout {
            acks: start + self.layout.acks,
            banks: start + self.layout.banks,
            ..self.layout
        }
    }

    /// Start, from the start of the LL region, and length of the rows of each bank: they must hold
    /// `LL_MARK` before the first operation.
    pub fn marked(&self) -> impl Iterator<Item = (usize, usize)> {
        let (banks, bank_bytes) = (self.layout.banks as usize, self.layout.bank_bytes as usize);
        let rows_bytes = self.rows_bytes;
        (0..LL_BANKS as usize).map(move |bank| (banks + bank * bank_bytes, rows_bytes))
    }

    /// How combines sum.
    pub fn mode(&self) -> LlCombineMode {
        self.facts.ll_combine
    }

    /// Sizes of a handle's device memory.
    pub fn handle_memory(&self, top_k: usize) -> HandleSizes {
        let entries = self.max_tokens * top_k;
        HandleSizes {
            expert_of: entries * size_of::<i32>(),
            row_of: self.facts.ranks * entries * size_of::<i32>(),
            tokens_of: self.facts.ranks * size_of::<u32>(),
        }
    }

    /// Dynamic shared memory of a dispatch block.
    pub fn dispatch_shared_bytes(&self) -> u32 {
        (self.facts.experts * SHARED_BYTES_PER_EXPERT) as u32
    }

    /// The grid of a dispatch of `tokens` on a device with so many multiprocessors, and how many of its
    /// receiving blocks announce.
    ///
    /// A rank sends its own tokens and receives those of all. How many the others have is not known
    /// here, and in a graph it may be another number at each launch.
    pub fn dispatch_grid(&self, tokens: usize, multiprocessors: u32) -> (Grid, u32) {
        let own = self.even_dispatch_grid(tokens, multiprocessors);
        let most = self.even_dispatch_grid(self.max_tokens, multiprocessors);
        let grid = own.with_receivers(most.blocks / SERVING_SHARE);
        (grid.with_threads(most.threads), own.receive_blocks)
    }

    /// The grid of a dispatch where all ranks have `tokens`.
    ///
    /// Measured on H200 (docs/performance.md): a quarter of the multiprocessors saturates NVLink with
    /// rows, the others copy out what arrives.
    fn even_dispatch_grid(&self, tokens: usize, multiprocessors: u32) -> Grid {
        if let Some(choice) = self.tuning.choice(Operation::LlDispatch, tokens) {
            return Grid::chosen(choice, DISPATCH_LEAST_THREADS..=LL_DISPATCH_THREADS);
        }
        let senders = at_most(8 + tokens, multiprocessors / MULTIPROCESSORS_PER_SENDER);
        let receivers = at_most(8 + 4 * tokens, multiprocessors - senders);
        Grid::split(senders, receivers, LL_DISPATCH_THREADS)
    }

    /// The grid of a combine of `tokens` on a device with so many multiprocessors: a rank receives its
    /// own tokens and sends rows of those of all.
    pub fn combine_grid(&self, tokens: usize, multiprocessors: u32) -> Grid {
        let own = self.even_combine_grid(tokens, multiprocessors);
        let most = self.even_combine_grid(self.max_tokens, multiprocessors);
        let grid = own.with_senders(most.blocks / SERVING_SHARE);
        grid.with_threads(most.threads)
    }

    /// The grid of a combine where all ranks have `tokens`.
    fn even_combine_grid(&self, tokens: usize, multiprocessors: u32) -> Grid {
        if let Some(choice) = self.tuning.choice(Operation::LlCombine, tokens) {
            return Grid::chosen(choice, 1..=LL_COMBINE_THREADS);
        }
        if tokens >= MANY_TOKENS {
            let senders = multiprocessors * 3 / 4;
            return Grid::split(senders, multiprocessors - senders, LL_COMBINE_THREADS);
        }
        let blocks = at_most((4 * tokens).max(LEAST_COMBINE_BLOCKS), multiprocessors);
        Grid::shared(blocks, LL_COMBINE_THREADS)
    }

    /// What the kernels are told about the sizes of an operation.
    pub fn shape(&self, routing: &Routing, row: RowType) -> Result<LlShape> {
        let chunks = chunks(row.bytes());
        let chunk_bytes = row.bytes().div_ceil(chunks).next_multiple_of(16);
        Ok(LlShape {
            local_experts: number(self.facts.local_experts())?,
            max_tokens: number(self.max_tokens)?,
            tokens: number(routing.tokens)?,
            top_k: number(routing.top_k)?,
            row_bytes: number(row.bytes())?,
            chunk_bytes: number(chunk_bytes)?,
            chunks: number(chunks)?,
        })
    }
}

/// Refuses what the kernels' shared memory or the fields of their packets do not hold.
fn check_limits(facts: &GroupFacts, max_tokens: usize) -> Result<()> {
    let local = (1 << (32 - LL_INDEX_BITS)) - 1;
    let experts = (MAX_SHARED_BYTES / SHARED_BYTES_PER_EXPERT).min(local * facts.ranks);
    let rows = ((1 << LL_INDEX_BITS) - 1).min(i32::MAX as usize / facts.local_experts());
    let row_bytes = signature::MOST_ROW_BYTES;
    let limits = [
        (Setting::Experts, facts.experts, experts),
        (Setting::RowBytes, facts.row_bytes, row_bytes),
        (Setting::MaxTokens, max_tokens, rows / facts.ranks),
    ];
    let Some((setting, got, most)) = limits.into_iter().find(|(_, got, most)| got > most) else {
        return Ok(());
    };
    let rule = OfSettings::LlKernelsCount;
    Err(Error::usage(Subject::Setting(setting), rule).got(got, format_args!("at most {most}")))
}

/// Chunks that a row of `row_bytes` is moved in.
fn chunks(row_bytes: usize) -> usize {
    row_bytes.div_ceil(CHUNK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::dtype::DType;
    use crate::model::group::Algorithm;
    use crate::model::tensor::DevPtr;
    use crate::tuning::Choice;

    fn facts(max_tokens: usize, ll_combine: LlCombineMode) -> GroupFacts {
        GroupFacts {
            algorithm: Algorithm::LowLatency,
            ranks: 8,
            rank: 0,
            experts: 256,
            max_tokens: Some(max_tokens),
            max_recv_rows: Some(8 * max_tokens),
            row_bytes: 14_336,
            ll_combine,
            channels: None,
        }
    }

    #[test]
    fn the_common_configuration_fits_64_mib() {
        let plan = LlPlan::new(&facts(128, LlCombineMode::Reduce)).unwrap();
        let handle = plan.handle_memory(8);
        let bytes = plan.bytes() + handle.expert_of + handle.row_of + handle.tokens_of;
        assert!(bytes <= 64 << 20, "{bytes}");
    }

    #[test]
    fn what_kernels_cannot_count_is_refused() {
        let refused = |ranks, local_experts, tokens| {
            let facts = GroupFacts {
                ranks,
                experts: ranks * local_experts,
                ..facts(tokens, LlCombineMode::Reduce)
            };
            LlPlan::new(&facts).is_err()
        };
        assert!(!refused(1, 4095, 4) && refused(1, 4096, 4));
        assert!(!refused(8, 752, 4) && refused(8, 753, 4));
        assert!(!refused(8, 2, 131_071) && refused(8, 2, 131_072));
        assert!(!refused(1, 2048, 1_048_575) && refused(1, 2049, 1_048_575));
        let rows_of = |row_bytes| GroupFacts {
            row_bytes,
            ..facts(4, LlCombineMode::Reduce)
        };
        assert!(LlPlan::new(&rows_of((16 << 20) - 16)).is_ok());
        assert!(LlPlan::new(&rows_of(16 << 20)).is_err());
    }

    #[test]
    fn regions_do_not_overlap() {
        for mode in [LlCombineMode::Reduce, LlCombineMode::Exact] {
            let plan = LlPlan::new(&facts(50, mode)).unwrap();
            let layout = plan.layout(4096);
            assert!(layout.acks >= 4096);
            assert!(layout.acks + 3 * 8 * 8 <= layout.banks);
            assert!(plan.rows_bytes as u64 <= layout.flags);
            assert!(layout.flags < layout.counts && layout.counts < layout.entries);
            assert!(layout.entries + 8 * 50 * 32 * 8 <= layout.bank_bytes);
            assert!(layout.banks + 4 * layout.bank_bytes <= 4096 + plan.bytes() as u64);
            assert!(
                plan.marked()
                    .all(|(start, bytes)| start + bytes <= plan.bytes())
            );
        }
    }

    #[test]
    fn measured_grids_have_threads_for_every_role() {
        let choice = |threads| Choice {
            blocks: 4,
            threads,
            send_blocks: 4,
        };
        let possible = || DISPATCH_LEAST_THREADS..=LL_DISPATCH_THREADS;
        for (asked, given) in [(32, 160), (160, 160), (256, 256), (1024, 512)] {
            assert_eq!(Grid::chosen(choice(asked), possible()).threads, given);
        }
    }

    #[test]
    fn chunks_cover_every_row() {
        let plan = LlPlan::new(&facts(8, LlCombineMode::Reduce)).unwrap();
        let routing = Routing {
            ids: DevPtr(8),
            width: crate::model::ops::IdWidth::Bits64,
            tokens: 3,
            top_k: 2,
        };
        for hidden in [8, 16, 1000, 1024, 1032, 7168] {
            let row = RowType {
                dtype: DType::Bfloat16,
                hidden,
            };
            let shape = plan.shape(&routing, row).unwrap();
            assert_eq!(shape.chunk_bytes % 16, 0);
            assert!(shape.chunk_bytes as usize <= CHUNK_BYTES);
            assert!(shape.chunks * shape.chunk_bytes >= shape.row_bytes);
            assert!((shape.chunks - 1) * shape.chunk_bytes < shape.row_bytes);
        }
    }

    #[test]
    fn a_measured_grid_goes_first() {
        let file = r#"{"format": "nccl_ep tuning", "version": 1, "gpu": "G", "ranks": 8, "entries": [
            {"operation": "ll_dispatch", "tokens": 16, "blocks": 20, "threads": 1024, "send_blocks": 5},
            {"operation": "ll_combine", "tokens": 16, "blocks": 7, "threads": 64, "send_blocks": 7}]}"#;
        let tuning = Tuning::parse(file, "G", 8, 132).unwrap();
        let own = LlPlan::new(&facts(1024, LlCombineMode::Reduce)).unwrap();
        let plan = LlPlan { tuning, ..own };
        let split = Grid::split(5, 61, LL_DISPATCH_THREADS);
        assert_eq!(plan.dispatch_grid(9, 132), (split, 15));
        assert_eq!(plan.even_combine_grid(16, 132), Grid::shared(7, 64));
        let serving = Grid::shared(66, LL_COMBINE_THREADS);
        assert_eq!(plan.combine_grid(16, 132), serving);
        assert_eq!(plan.dispatch_grid(17, 132), own.dispatch_grid(17, 132));
    }

    #[test]
    fn a_rank_with_few_tokens_serves_those_of_the_others() {
        for max_tokens in [1, 128, 1024] {
            let plan = LlPlan::new(&facts(max_tokens, LlCombineMode::Reduce)).unwrap();
            let (even, _) = plan.dispatch_grid(max_tokens, 132);
            let even_combine = plan.combine_grid(max_tokens, 132);
            for tokens in [0, 1, 3, 16, 128]
                .into_iter()
                .filter(|&it| it <= max_tokens)
            {
                let (grid, announcers) = plan.dispatch_grid(tokens, 132);
                assert!(grid.blocks >= even.blocks / SERVING_SHARE);
                assert!(grid.receive_blocks >= even.receive_blocks / SERVING_SHARE);
                assert!((1..=grid.receive_blocks).contains(&announcers));
                let combine = plan.combine_grid(tokens, 132);
                assert!(combine.send_blocks >= even_combine.send_blocks / SERVING_SHARE);
            }
        }
    }

    #[test]
    fn grids_grow_with_the_work_and_stay_resident() {
        for multiprocessors in [1, 2, 108, 132] {
            let mut last = 0;
            for tokens in [1, 4, 5, 16, 64, 128, 256, 1024] {
                let plan = LlPlan::new(&facts(tokens, LlCombineMode::Reduce)).unwrap();
                let (dispatch, _) = plan.dispatch_grid(tokens, multiprocessors);
                for grid in [dispatch, plan.combine_grid(tokens, multiprocessors)] {
                    assert!(grid.blocks <= multiprocessors);
                    assert!(grid.send_blocks >= 1 && grid.receive_blocks >= 1);
                    assert!(grid.send_blocks + grid.receive_blocks >= grid.blocks);
                }
                assert!(dispatch.blocks >= last);
                last = dispatch.blocks;
            }
        }
    }
}

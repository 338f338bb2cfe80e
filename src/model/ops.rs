//! Checked operations, as backends run them.
//!
//! `rule` makes them from the caller's tensors. They have everything by value, so a staged operation outlives the
//! caller's descriptors.

use crate::model::group::LlCombineMode;
use crate::model::layout::Layout;
use crate::model::scales::{Scaled, WireRow};
pub use crate::model::tensor::RowType;
use crate::model::tensor::{DType, DevPtr};
use std::borrow::Cow;

/// A caller's CUDA stream; 0 is the default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub usize);

impl Stream {
    pub const DEFAULT: Self = Self(0);
    /// The default stream of the calling thread, `cudaStreamPerThread`.
    pub const PER_THREAD: Self = Self(2);
}

/// The width of a caller's signed integers, such as ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntWidth {
    Bits32,
    Bits64,
}

impl IntWidth {
    /// The width of `dtype`, if it is a signed integer type of 32 or 64 bits.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::Int32 => Some(Self::Bits32),
            DType::Int64 => Some(Self::Bits64),
            _ => None,
        }
    }

    pub const fn dtype(self) -> DType {
        match self {
            Self::Bits32 => DType::Int32,
            Self::Bits64 => DType::Int64,
        }
    }

    pub const fn bytes(self) -> usize {
        match self {
            Self::Bits32 => size_of::<i32>(),
            Self::Bits64 => size_of::<i64>(),
        }
    }

    /// `numbers` of this width, widened to 64 bits.
    pub fn widened(self, numbers: &[u8]) -> Cow<'_, [u8]> {
        match self {
            Self::Bits64 => Cow::Borrowed(numbers),
            Self::Bits32 => {
                let wide = numbers.as_chunks().0.iter().map(|it| i64::from(i32::from_ne_bytes(*it)));
                Cow::Owned(wide.flat_map(i64::to_ne_bytes).collect())
            }
        }
    }
}

/// Properties of handles, chosen by the ABI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandleForm {
    /// Whether a handle keeps its ids, of either width. Then a forward HT dispatch reads them from the handle, and
    /// weight gradients are in the order of a token's ids. Otherwise callers pass the ids again, and gradients are in
    /// the order of ascending experts.
    pub keeps_ids: bool,
    /// HT: if rows are ordered by expert, with a row for each expert of a token.
    pub zones: Option<Zones>,
    /// HT without zones, if the handle keeps its ids: the most rows of each rank, beyond which rows are dropped; `None`
    /// without a limit. The same on all ranks.
    pub most_rows: Option<usize>,
}

/// The order of rows by expert in HT: each expert has a contiguous zone, by source rank, then token, padded with zeros
/// to a multiple of an alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zones {
    /// A power of two, as `rule::handle::alignment` checks.
    pub alignment: usize,
    /// The most slots, beyond which rows are dropped, the last experts' first; `None` without a limit.
    pub most_slots: Option<usize>,
}

impl Zones {
    /// The size of a zone with `rows`, including padding.
    pub fn padded(self, rows: usize) -> usize {
        rows.next_multiple_of(self.alignment)
    }

    /// The most slots that `rows` take if each is for at most `top_k` of the `experts` here, within the bound.
    pub fn most(self, rows: usize, top_k: usize, experts: usize) -> usize {
        let most = rows * top_k.min(experts) + experts * (self.alignment - 1);
        let most = most / self.alignment * self.alignment;
        self.most_slots.map_or(most, |slots| slots.min(most))
    }
}

/// An array of a caller's integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    pub data: DevPtr,
    pub width: IntWidth,
}

/// What an HT routing reports to its caller; `None` for what the caller does not want.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoutingCounters {
    /// `[L]`: received rows per local expert; with zones the slots of each, without dropped ones.
    pub experts: Option<Numbers>,
    /// With zones, `[L]`: the first slot of each expert.
    pub offsets: Option<Numbers>,
    /// `[1]`: number of received rows; with zones of all slots, including dropped ones.
    pub total: Option<Numbers>,
}

/// A handle's top-k ids `[tokens, top_k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    pub ids: DevPtr,
    pub width: IntWidth,
    /// The number of this rank's tokens.
    pub tokens: usize,
    pub top_k: usize,
    pub form: HandleForm,
}

/// A caller's launch options for an operation, within the group's bound; zeros leave the choice to the library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launch {
    pub blocks: u32,
    /// Blocks that send.
    pub send_blocks: u32,
    pub threads: u32,
    /// Whether the kernel begins only after the previous one has ended.
    pub in_order: bool,
}

impl Launch {
    /// Whether the grid is left to the library.
    #[inline]
    pub fn is_own(self) -> bool {
        Self { in_order: false, ..self } == Self::default()
    }
}

/// The ids and weights of a rank-major LL dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankMajorTopk {
    /// f32 `[T, K]`: the weights of this rank's tokens.
    pub weights: DevPtr,
    /// `[R, M, K]`: ids, -1 for experts elsewhere and in unused rows.
    pub out_ids: Numbers,
    /// The first local expert's number in `out_ids`.
    pub first_id: usize,
    /// f32 `[R, M, K]`: the weights of received tokens.
    pub out_weights: DevPtr,
}

/// An LL dispatch: `tokens [T, H]` to `out [L, R*M, H]` or, rank-major, `[R, M, H]`, optionally with scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlDispatch {
    /// Element type and width of rows as sent and received; also of the input rows, unless it is a cast.
    pub row: RowType,
    pub scaled: Option<Scaled>,
    pub tokens: DevPtr,
    /// Output rows; NULL in a receive phase whose rows are discarded.
    pub out: DevPtr,
    /// Rank-major: the bank of the library's in which `out` is a view; `None` without a view.
    pub view: Option<ViewBank>,
    pub layout: Layout,
    /// Rank-major: the ids and weights.
    pub topk: Option<RankMajorTopk>,
    /// int32 `[L]` or, rank-major, `[R]`: rows received per local expert or source rank.
    pub counter: Option<DevPtr>,
    /// int64 `[R]`: gets the nanoseconds of waiting for each source added.
    pub waits: Option<DevPtr>,
    /// int64 `[L]`: gets the rows in the counter added, of an expert-major dispatch with one.
    pub totals: Option<DevPtr>,
    pub launch: Launch,
}

impl LlDispatch {
    /// The counter and the totals that its rows are added to, if both are wanted.
    pub fn counted(&self) -> Option<(DevPtr, DevPtr)> {
        if self.layout.is_rank_major() { None } else { self.counter.zip(self.totals) }
    }

    pub fn wire(&self) -> WireRow {
        wire(self.row, self.scaled)
    }
}

fn wire(payload: RowType, scaled: Option<Scaled>) -> WireRow {
    WireRow { payload, scales: scaled.map(|scaled| scaled.scales) }
}

/// LL combine: `expert_rows [L, R*M, H]` and `weights [T, K]`, or `[R, M, H]` alone, to `out [T, H]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlCombine {
    /// Element type and width of input and output rows.
    pub row: RowType,
    /// Input rows, in the same positions as a dispatch's output rows.
    pub expert_rows: DevPtr,
    /// The bank of the view that the handle's last dispatch filled, and which this operation ends.
    pub view: Option<ViewBank>,
    pub layout: Layout,
    /// f32 `[T, K]`; `None` in rank-major combines, where the caller has applied weights and summed each rank's rows.
    pub weights: Option<DevPtr>,
    pub out: DevPtr,
    /// How experts' rows are summed; ignored in rank-major combines.
    pub sums: LlCombineMode,
    /// As in [`LlDispatch`].
    pub waits: Option<DevPtr>,
    pub launch: Launch,
}

impl LlCombine {
    /// Whether every entry's row goes home: an exact combine that is not rank-major.
    pub fn is_exact(&self) -> bool {
        self.sums == LlCombineMode::Exact && !self.layout.is_rank_major()
    }
}

/// An LL operation, whole or staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlOp {
    Dispatch(LlDispatch),
    Combine(LlCombine),
}

impl LlOp {
    pub fn layout(&self) -> Layout {
        match self {
            Self::Dispatch(op) => op.layout,
            Self::Combine(op) => op.layout,
        }
    }
}

/// A 2-D tensor; the number of rows is its only free dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    pub data: DevPtr,
    /// The number of rows.
    pub rows: usize,
}

/// Top-k ids (int64) and weights (f32) that travel with the tokens in a forward HT dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdsAndWeights {
    /// int64 `[rows, K]`; NULL as inputs if the handle keeps its ids, and as outputs with zones.
    pub ids: DevPtr,
    /// f32 `[rows, K]`; outputs with zones are `[rows]`.
    pub weights: DevPtr,
    pub rows: usize,
}

/// An HT dispatch: `tokens [T, H]` to `out [n, H]`, optionally with scales, and in a forward dispatch ids and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HtDispatch {
    /// Element type and width of rows as sent and received; also of the input rows, unless it is a cast.
    pub row: RowType,
    pub scaled: Option<Scaled>,
    pub tokens: DevPtr,
    /// Output rows; optional in a forward dispatch.
    pub out: Option<Rows>,
    /// Ids and weights `[T, K]` of this rank's tokens: present in forward dispatches.
    pub routing_in: Option<IdsAndWeights>,
    /// Gets the received tokens' local ids and weights.
    pub routing_out: Option<IdsAndWeights>,
    /// int32 `[L]`: received tokens per local expert.
    pub counter: Option<DevPtr>,
    /// The first local expert's number in the delivered ids.
    pub first_id: usize,
    /// Without zones: whether rows and scales that no token fills are left unchanged rather than zeroed.
    pub keeps_rest: bool,
    pub launch: Launch,
    pub path: HtPath,
    /// With zones, what the dispatch reports to its caller, as a routing does.
    pub counters: RoutingCounters,
}

impl HtDispatch {
    pub fn wire(&self) -> WireRow {
        wire(self.row, self.scaled)
    }
}

/// Weight gradients of an HT combine: from `input [rows, K]` on expert ranks to `output [T, K]` on the home rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightGradients {
    /// f32, in the order in which dispatches deliver weights: by ascending local expert, or with zones one per slot.
    pub input: DevPtr,
    pub rows: usize,
    /// f32, by ascending global expert, followed by zeros; or by k.
    pub output: DevPtr,
    /// Columns of both tensors.
    pub top_k: usize,
    /// Whether gradients are ordered by k, at the ids that the handle keeps; ids without an expert get zeros.
    pub by_k: bool,
}

/// The path of rows in an HT operation, as chosen by its caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HtPath {
    /// The faster one, by the library's rule.
    #[default]
    Auto,
    /// Through rings.
    Ring,
    /// Directly from or to memory that peers map, if the rows are there.
    Direct,
}

/// An HT combine: `expert_rows [n, H]` to `out [T, H]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HtCombine {
    /// Element type and width of input and output rows.
    pub row: RowType,
    /// Input rows, in the order in which a dispatch delivers them.
    pub expert_rows: Rows,
    pub out: DevPtr,
    /// The weight gradients of backward combines.
    pub gradients: Option<WeightGradients>,
    /// As in an LL dispatch.
    pub waits: Option<DevPtr>,
    pub launch: Launch,
    pub path: HtPath,
}

/// A bank of views, which rank-major dispatches without an output tensor fill in turn, the same on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ViewBank(usize);

impl ViewBank {
    pub const COUNT: usize = 2;

    /// The bank number `index`, if it is below [`ViewBank::COUNT`].
    pub fn at(index: usize) -> Option<Self> {
        (index < Self::COUNT).then_some(Self(index))
    }

    /// The bank's number, below [`ViewBank::COUNT`].
    pub fn index(self) -> usize {
        self.0
    }

    /// The next bank in turn.
    pub fn next(self) -> Self {
        Self((self.0 + 1) % Self::COUNT)
    }
}

/// How many staged operations a group may have in flight.
pub const STAGED_SLOTS: usize = 2;

/// A slot for a staged operation; the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedSlot(usize);

impl StagedSlot {
    pub const ALL: [Self; STAGED_SLOTS] = [Self(0), Self(1)];

    /// The slot's number, below [`STAGED_SLOTS`].
    pub fn index(self) -> usize {
        self.0
    }

    /// The element of `all` for this slot.
    pub fn of<T>(self, [first, second]: &[T; STAGED_SLOTS]) -> &T {
        match self.0 {
            0 => first,
            _ => second,
        }
    }
}

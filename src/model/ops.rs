//! Checked operations.
//!
//! `rule` makes them from the caller's tensors; a backend runs them. They hold everything by value, so a staged
//! operation outlives the caller's descriptors.

use crate::model::group::LlCombineMode;
use crate::model::layout::Layout;
use crate::model::scales::{Scaled, WireRow};
pub use crate::model::tensor::RowType;
use crate::model::tensor::{DType, DevPtr};
use std::borrow::Cow;

/// A CUDA stream, as the caller named it; 0 is the default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub usize);

impl Stream {
    pub const DEFAULT: Self = Self(0);
    /// The default stream of the calling thread, `cudaStreamPerThread`.
    pub const PER_THREAD: Self = Self(2);
}

/// Width of an id or another of a caller's integers; signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntWidth {
    Bits32,
    Bits64,
}

impl IntWidth {
    /// The width of `dtype`, if it is such an integer type.
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

    /// `numbers` of this width, widened to 64 bits each.
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

/// Properties that an ABI wants of its handles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandleForm {
    /// Whether a handle keeps its ids, of either width: then a forward HT dispatch reads them from the handle, and
    /// gradients of weights come in the order of a token's ids. Otherwise callers pass them again, and gradients come
    /// by ascending expert.
    pub keeps_ids: bool,
    /// HT: rows lie by expert; a row for several experts is there once for each.
    pub zones: Option<Zones>,
    /// HT without zones, where the handle keeps its ids: the rows that each rank has room for; rows beyond are dropped.
    /// `None`: no limit. The same on all ranks.
    pub most_rows: Option<usize>,
}

/// How an HT handle's rows lie by expert: those of an expert together, by source rank, then token, padded with zeros to
/// a multiple of an alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zones {
    /// A power of two, as `rule::handle::alignment` checks.
    pub alignment: usize,
    /// Number of slots: rows beyond are dropped, the last experts' first. `None`: no limit.
    pub most_slots: Option<usize>,
}

impl Zones {
    /// The size of a zone of `rows`, with padding.
    pub fn padded(self, rows: usize) -> usize {
        rows.next_multiple_of(self.alignment)
    }

    /// The most slots that `rows` rows take, each for at most `top_k` of the `experts` here; no more than the bound.
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

/// What an HT routing reports to its caller, if asked to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoutingCounters {
    /// `[L]`: received rows per local expert; with zones the slots of each, as far as there is room.
    pub experts: Option<Numbers>,
    /// With zones, `[L]`: the first slot of each expert.
    pub offsets: Option<Numbers>,
    /// `[1]`: received rows; with zones all slots, including dropped ones.
    pub total: Option<Numbers>,
}

/// A handle's top-k ids `[tokens, top_k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    pub ids: DevPtr,
    pub width: IntWidth,
    /// This rank's tokens.
    pub tokens: usize,
    pub top_k: usize,
    pub form: HandleForm,
}

/// The launch shape that a caller wants for one operation; zeros leave it to the library. Within the group's bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launch {
    pub blocks: u32,
    /// Blocks that send.
    pub send_blocks: u32,
    pub threads: u32,
    /// Whether the kernel waits for the one before it to end.
    pub in_order: bool,
}

impl Launch {
    /// Whether the grid is left to the library.
    #[inline]
    pub fn is_own(self) -> bool {
        Self { in_order: false, ..self } == Self::default()
    }
}

/// What a rank-major LL dispatch sends beside its rows, and where it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlTopk {
    /// f32 `[T, K]`: the weights of this rank's tokens.
    pub weights: DevPtr,
    /// `[R, M, K]`: ids, -1 for experts elsewhere and in unused rows.
    pub out_ids: Numbers,
    /// The first local expert's number in `out_ids`.
    pub first_id: usize,
    /// f32 `[R, M, K]`: the weights of received tokens.
    pub out_weights: DevPtr,
}

/// LL dispatch: `tokens [T, H]` to `out [L, R*M, H]` or, rank-major, `[R, M, H]`, optionally with scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlDispatch {
    /// Element type and width of rows as sent and received; also of the input rows, unless it is a cast.
    pub row: RowType,
    pub scaled: Option<Scaled>,
    pub tokens: DevPtr,
    /// Where rows go; NULL in the receive phase of a dispatch whose rows nobody wants any more.
    pub out: DevPtr,
    /// Rank-major: `out` is the view in this bank of the library's.
    pub view: Option<ViewBank>,
    pub layout: Layout,
    /// Rank-major: the ids and weights.
    pub topk: Option<LlTopk>,
    /// int32 `[L]` or, rank-major, `[R]`: rows received per local expert or source rank.
    pub counter: Option<DevPtr>,
    /// int64 `[R]`: gets the nanoseconds of waiting for each source added.
    pub waits: Option<DevPtr>,
    pub launch: Launch,
}

impl LlDispatch {
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
    /// Input rows, in the places where dispatch put their tokens.
    pub expert_rows: DevPtr,
    /// The bank of the view that the handle's last dispatch filled; this operation ends the view.
    pub view: Option<ViewBank>,
    pub layout: Layout,
    /// f32 `[T, K]`; none rank-major, where the caller has applied them and summed each rank's rows.
    pub weights: Option<DevPtr>,
    pub out: DevPtr,
    /// How experts' rows are summed; ignored if the caller has summed them.
    pub sums: LlCombineMode,
    /// As in [`LlDispatch`].
    pub waits: Option<DevPtr>,
    pub launch: Launch,
}

impl LlCombine {
    /// Whether every entry's row goes home: an exact combine of rows that the caller has not summed.
    pub fn is_exact(&self) -> bool {
        self.sums == LlCombineMode::Exact && !self.layout.is_rank_major()
    }
}

/// An LL operation; both kinds may be staged.
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

    /// int32 `[L]` that a dispatch of rows by expert fills with their counts, if it has a counter.
    pub fn rows_of_experts(&self) -> Option<DevPtr> {
        match self {
            Self::Dispatch(op) if !op.layout.is_rank_major() => op.counter,
            _ => None,
        }
    }
}

/// A 2-D tensor whose only free dimension is its number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    pub data: DevPtr,
    /// Rows that the caller provided.
    pub rows: usize,
}

/// Top-k ids (int64) and weights (f32) that travel with the tokens in a forward HT dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdsAndWeights {
    /// int64 `[rows, K]`; as inputs none where the handle keeps its ids, as outputs none with zones.
    pub ids: DevPtr,
    /// f32 `[rows, K]`; outputs with zones are `[rows]`.
    pub weights: DevPtr,
    pub rows: usize,
}

/// HT dispatch: `tokens [T, H]` to `out [n, H]`, maybe with scales; forward with ids and weights, else tokens only.
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
    /// Without zones: whether rows and scales that no token fills are left alone, instead of zeroed.
    pub keeps_rest: bool,
    pub launch: Launch,
    pub way: HtWay,
    /// With zones, what the dispatch reports to its caller, like a routing.
    pub counters: RoutingCounters,
}

impl HtDispatch {
    pub fn wire(&self) -> WireRow {
        wire(self.row, self.scaled)
    }
}

/// Backward weights of an HT combine: `input [rows, K]` of the expert rank to `output [T, K]` at home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightGradients {
    /// f32, as dispatch delivers weights: by ascending local expert; with zones one per slot.
    pub input: DevPtr,
    pub rows: usize,
    /// f32, by ascending global expert, then zeros; or by k.
    pub output: DevPtr,
    /// Columns of both.
    pub top_k: usize,
    /// Whether each gradient goes to the ids that name its expert, which the handle keeps; the others get zeros.
    pub by_k: bool,
}

/// How the rows of an HT operation move, as its caller wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HtWay {
    /// Whichever is faster by the library's rule.
    #[default]
    Own,
    /// Through rings.
    Ring,
    /// Directly from or to memory that peers map, if the rows lie there.
    Straight,
}

/// HT combine: `expert_rows [n, H]` to `out [T, H]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HtCombine {
    /// Element type and width of input and output rows.
    pub row: RowType,
    /// Input rows, in the order that dispatch delivered.
    pub expert_rows: Rows,
    pub out: DevPtr,
    /// Present in backward combines.
    pub gradients: Option<WeightGradients>,
    /// As in an LL dispatch.
    pub waits: Option<DevPtr>,
    pub launch: Launch,
    pub way: HtWay,
}

/// One of a group's banks of views, which rank-major dispatches without an output tensor fill in turn; the same on all
/// ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ViewBank(usize);

impl ViewBank {
    pub const COUNT: usize = 2;

    /// The bank with this number, if it is below [`ViewBank::COUNT`].
    pub fn at(index: usize) -> Option<Self> {
        (index < Self::COUNT).then_some(Self(index))
    }

    /// Number of the bank, below [`ViewBank::COUNT`].
    pub fn index(self) -> usize {
        self.0
    }

    /// The next bank in turn.
    pub fn next(self) -> Self {
        Self((self.0 + 1) % Self::COUNT)
    }
}

/// Staged operations that one group may have in flight.
pub const STAGED_SLOTS: usize = 2;

/// One of a group's staged slots; the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedSlot(usize);

impl StagedSlot {
    pub const ALL: [Self; STAGED_SLOTS] = [Self(0), Self(1)];

    /// Number of the slot, below [`STAGED_SLOTS`].
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

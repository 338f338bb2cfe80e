//! Checked operations, as a backend runs them.
//!
//! `rule` makes them from the caller's tensors; a backend runs them. Everything is held by value,
//! so a staged operation outlives the caller's descriptors.

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

/// How wide an id is, or another whole number of a caller's; signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntWidth {
    Bits32,
    Bits64,
}

impl IntWidth {
    /// That of elements of type `dtype`, if they are such numbers.
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

    /// The `numbers` of this width with 64 bits each.
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

/// What an ABI wants handles to be like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandleForm {
    /// Whether a handle keeps its ids, which may be of either width: a forward dispatch in HT takes them from there,
    /// and gradients of weights come in the order of a token's ids. Else callers give them again, and gradients come
    /// by ascending expert.
    pub keeps_ids: bool,
    /// HT: rows lie by expert; a row that comes for several experts is there once for each.
    pub zones: Option<Zones>,
    /// HT, of rows that do not lie by expert, where the handle keeps its ids: rows that there are on each rank; what comes
    /// beyond is dropped. `None`: nothing is. The same on all ranks.
    pub most_rows: Option<usize>,
}

/// How the rows of a handle lie by expert: those of an expert together, by source rank, then token, filled up with zeros
/// to a multiple of an alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zones {
    /// A power of two, as `rule::handle::alignment` checks.
    pub alignment: usize,
    /// Slots that there are: what comes beyond is dropped, the last experts' first. `None`: nothing is.
    pub most_slots: Option<usize>,
}

impl Zones {
    /// A zone of so many rows, with what fills it up.
    pub fn padded(self, rows: usize) -> usize {
        rows.next_multiple_of(self.alignment)
    }

    /// The most slots that there are for `rows` rows, each of at most `top_k` of the `experts` here.
    pub fn most(self, rows: usize, top_k: usize, experts: usize) -> usize {
        let most = rows * top_k.min(experts) + experts * (self.alignment - 1);
        most / self.alignment * self.alignment
    }
}

/// Numbers of a caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    pub data: DevPtr,
    pub width: IntWidth,
}

/// What a routing tells its caller in HT, where he wants it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoutingCounters {
    /// `[L]`: received rows per local expert; with zones the slots of each, as far as there are.
    pub experts: Option<Numbers>,
    /// With zones, `[L]`: the first slot of each.
    pub offsets: Option<Numbers>,
    /// `[1]`: received rows; with zones all slots, also those that are dropped.
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

/// The launch shape that a caller wants of one operation; zeros are the library's own. It fits the group's bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launch {
    pub blocks: u32,
    /// Blocks that send.
    pub send_blocks: u32,
    pub threads: u32,
    /// Not while the kernel before it runs.
    pub in_order: bool,
}

impl Launch {
    /// Whether the library decides alone about the grid.
    #[inline]
    pub fn is_own(self) -> bool {
        Self { in_order: false, ..self } == Self::default()
    }
}

/// What a rank-major LL dispatch sends beside its rows, and where it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlBeside {
    /// f32 `[T, K]`: the weights of this rank's tokens.
    pub weights: DevPtr,
    /// `[R, M, K]`: ids, -1 for experts elsewhere and in rows that hold nothing.
    pub out_ids: Numbers,
    /// The number of this rank's first expert among them.
    pub first_id: usize,
    /// f32 `[R, M, K]`: the weights of received tokens.
    pub out_weights: DevPtr,
}

/// LL dispatch: `tokens [T, H]` to `out [L, R*M, H]` or, rank-major, `[R, M, H]`, maybe with scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlDispatch {
    /// Element type and width of rows as they travel and arrive; those of the input rows, too, unless it is a cast.
    pub row: RowType,
    pub scaled: Option<Scaled>,
    pub tokens: DevPtr,
    /// Where rows come; NULL as a phase is received whose rows nobody wants.
    pub out: DevPtr,
    /// Rank-major: they are a view, in this bank of the library's.
    pub view: Option<ViewBank>,
    pub layout: Layout,
    /// Rank-major: ids and weights.
    pub beside: Option<LlBeside>,
    /// int32 `[L]` or, rank-major, `[R]`: rows received per local expert, or from each source.
    pub counter: Option<DevPtr>,
    /// int64 `[R]`: the nanoseconds that the rank waits for each source are added.
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
    /// Input rows, where dispatch put their tokens.
    pub expert_rows: DevPtr,
    /// The bank of the view that the last dispatch of the handle has filled; it ends with this operation.
    pub view: Option<ViewBank>,
    pub layout: Layout,
    /// f32 `[T, K]`; none rank-major, where the caller has applied them and summed the rows of a rank.
    pub weights: Option<DevPtr>,
    pub out: DevPtr,
    /// How rows of experts are summed; without effect where the caller has.
    pub sums: LlCombineMode,
    /// As of a dispatch.
    pub waits: Option<DevPtr>,
    pub launch: Launch,
}

impl LlCombine {
    /// As [`LlOp::is_exact`].
    pub fn is_exact(&self) -> bool {
        self.sums == LlCombineMode::Exact && !self.layout.is_rank_major()
    }
}

/// One LL operation; both kinds may be staged.
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

    /// int32 `[L]`, which a dispatch of rows by expert fills with their numbers, if it has a counter.
    pub fn rows_of_experts(&self) -> Option<DevPtr> {
        match self {
            Self::Dispatch(op) if !op.layout.is_rank_major() => op.counter,
            _ => None,
        }
    }

    /// Whether each entry's row comes home: a combine that sums exactly rows that the caller has not summed.
    pub fn is_exact(&self) -> bool {
        matches!(self, Self::Combine(op) if op.is_exact())
    }
}

/// A 2-D tensor whose only free dimension is its number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    pub data: DevPtr,
    /// Rows that the caller provided.
    pub rows: usize,
}

/// Top-k ids (int64) and weights (f32) that travel with the tokens of a forward HT dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdsAndWeights {
    /// int64 `[rows, K]`; of inputs, none where the handle keeps its ids; of outputs, none with zones.
    pub ids: DevPtr,
    /// f32 `[rows, K]`; with zones outputs are `[rows]`.
    pub weights: DevPtr,
    pub rows: usize,
}

/// HT dispatch: `tokens [T, H]` to `out [n, H]`, maybe with scales; forward with ids and weights, else tokens only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HtDispatch {
    /// Element type and width of rows as they travel and arrive; those of the input rows, too, unless it is a cast.
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
    /// The number of this rank's first expert among the ids that are delivered.
    pub first_id: usize,
    /// Without zones: whether rows and scales that no token fills keep their content, and are not zeros.
    pub keeps_rest: bool,
    pub launch: Launch,
    pub way: HtWay,
    /// With zones, what the dispatch tells its caller as the routing has.
    pub counters: RoutingCounters,
}

impl HtDispatch {
    pub fn wire(&self) -> WireRow {
        wire(self.row, self.scaled)
    }
}

/// Backward weights of an HT combine: `input [n, K]` of the expert rank to `output [T, K]` at home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightGradients {
    /// f32, as dispatch delivers weights: local experts ascending, with zones one for each slot.
    pub input: DevPtr,
    /// f32, by ascending global expert id, then zeros; or by k.
    pub output: DevPtr,
    /// Columns of both.
    pub top_k: usize,
    /// Whether each goes to the ids that name its expert, which the handle keeps; zeros to the others.
    pub by_k: bool,
}

/// How the rows of an HT operation go, as its caller wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HtWay {
    /// As is faster by the library's rule.
    #[default]
    Own,
    /// Through rings.
    Ring,
    /// From or to memory that peers map, if it lies there.
    Straight,
}

/// HT combine: `expert_rows [n, H]` to `out [T, H]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HtCombine {
    /// Element type and width of input and output rows.
    pub row: RowType,
    /// Input rows, in dispatch's order.
    pub expert_rows: Rows,
    pub out: DevPtr,
    /// Present in backward combines.
    pub gradients: Option<WeightGradients>,
    /// As of an LL dispatch.
    pub waits: Option<DevPtr>,
    pub launch: Launch,
    pub way: HtWay,
}

/// One of a group's banks of views, which rank-major dispatches without a tensor of the caller's fill by turns; its number
/// is the same on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ViewBank(usize);

impl ViewBank {
    pub const COUNT: usize = 2;

    /// The one with this number; there is none from [`ViewBank::COUNT`] on.
    pub fn at(index: usize) -> Option<Self> {
        (index < Self::COUNT).then_some(Self(index))
    }

    /// Its number, below [`ViewBank::COUNT`].
    pub fn index(self) -> usize {
        self.0
    }

    /// The bank whose turn comes after this one's.
    pub fn next(self) -> Self {
        Self((self.0 + 1) % Self::COUNT)
    }
}

/// Staged operations that one group may have in flight.
pub const STAGED_SLOTS: usize = 2;

/// One of a group's staged slots; its number is the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedSlot(usize);

impl StagedSlot {
    pub const ALL: [Self; STAGED_SLOTS] = [Self(0), Self(1)];

    /// Its number, below [`STAGED_SLOTS`].
    pub fn index(self) -> usize {
        self.0
    }

    /// Its own of `all`.
    pub fn of<T>(self, [first, second]: &[T; STAGED_SLOTS]) -> &T {
        match self.0 {
            0 => first,
            _ => second,
        }
    }
}

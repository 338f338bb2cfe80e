//! Refusals as data: the refused subject and the rule that it breaks.
//!
//! The core has no names for arguments, as each ABI names them differently. An ABI puts a refusal into words; most of
//! the words are shared by all ABIs (`abi/common/src/texts`).

use crate::error::code::Code;
use crate::model::ids::GroupRank;

/// The role of a tensor in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Rows that an operation reads.
    TokensIn,
    /// Rows that an operation writes.
    TokensOut,
    /// Scales of the rows that are read.
    ScalesIn,
    /// Scales of the rows that are written.
    ScalesOut,
    /// The ids of a handle.
    Ids,
    /// Ids that a dispatch sends along.
    IdsIn,
    /// Ids that a dispatch delivers.
    IdsOut,
    /// Weights that travel with the rows.
    WeightsIn,
    /// Weights that are delivered.
    WeightsOut,
    /// Weights of this rank's own tokens, which a low-latency combine applies.
    TokenWeights,
    /// Received tokens per local expert, in device memory.
    Counter,
    /// The same in mapped host memory.
    HostCounter,
}

/// A setting that all ranks of a group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    Algorithm,
    Experts,
    MaxTokens,
    /// Most rows that one rank receives.
    RecvRows,
    /// What happens to rows beyond that.
    Overflow,
    /// The largest row, in bytes.
    RowBytes,
    /// How low-latency combines sum.
    LlCombine,
    /// How combines add the sums of nodes.
    NodeSums,
    /// Bytes that one HT pass sends to other nodes.
    HtChunkBytes,
}

/// The subject of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Communicator,
    /// The NCCL that the process uses.
    Nccl,
    Stream,
    Group,
    Handle,
    /// Whether an operation is staged.
    Staging,
    Library,
    Process,
    /// Memory for an object, or the memory of one.
    Memory,
    MemoryBytes,
    Setting(Setting),
    /// Which operation was called.
    Operation,
    RowBytes,
    RowType,
    ScaleType,
    /// The layout of an LL operation's rows.
    Layout,
    /// The bank of an operation's view.
    ViewPlace,
    /// How a low-latency combine sums.
    Variant,
    /// Whether the scales of a cast are powers of two.
    RoundScales,
    Tensor(Role),
    Dims(Role),
    /// The extent of one of its dimensions.
    Size(Role, usize),
    ElementType(Role),
    Strides(Role),
    /// Its address.
    Data(Role),
}

/// The number that an extent of a tensor is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    HandleTokens,
    HandleTopK,
    LocalExperts,
    /// The bound on received rows.
    RecvRows,
    Ranks,
    /// Elements of an input row.
    InputHidden,
    MaxTokens,
    /// The most tokens per rank with which one rank's received rows fit in 31 bits.
    CountableTokens,
    MostTopK,
    /// The smallest in LL.
    LeastTopK,
    RowsOf(Role),
    ColumnsOf(Role),
    ExpertsOf(Role),
    /// One scale per block of a row.
    Blocks,
}

macro_rules! rules {
    ($($kind:ident)*) => {
        /// A broken rule, grouped by what it is about.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Rule {
            $($kind($kind)),*
        }
        $(impl From<$kind> for Rule {
            fn from(rule: $kind) -> Self {
                Self::$kind(rule)
            }
        })*
    };
}
rules! { AmongRanks OfSettings InSequence OfTensor OfMemory }

/// Rules of the communicator and its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AmongRanks {
    NotNull,
    Blocking,
    // NCCL reports more ranks than one node can have.
    FewerRanks,
    Same { rank: GroupRank },
    // A dispatch sends ids and weights along on all ranks or on none; `rank` differs.
    SameDirection { rank: GroupRank },
    SameColumns { rank: GroupRank },
    // Repeated ids of `rank` take room at `expert` that rows of other ranks may need.
    RoomForRepeated { rank: GroupRank, expert: usize },
    NewEnoughForNetwork,
    HasForNetwork { name: &'static str },
    OwnIdsForNetwork,
    // `rank` refused its side with `code`.
    RefusedBy { rank: GroupRank, code: Code },
}

/// Rules of a group's settings and of what the library was built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfSettings {
    MultipleOfRanks,
    MultipleOf16,
    BoundNeeded,
    CountableRows,
    HoldsAllReceived,
    OneNode,
    LlKernelsCount,
    HtKernelsCount,
    HasKernels,
}

/// Rules of the order of calls, and of captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InSequence {
    GroupDestroyed,
    DestroyedMeanwhile,
    RouteFirst,
    DispatchFirst,
    CompleteFirst,
    FewerStaged,
    HighThroughputOnly,
    SameCaptureAsSend,
    CapturesInTurn { most: usize },
    // An abandoned operation cannot be discarded during capture: the graph would discard one at every launch.
    NoCaptureWhileGivenUp,
    // A routing is exchanged once, but a graph runs repeatedly.
    NoCaptureOfRouting,
    NoCaptureOfGroup,
    NoCaptureOfMemory,
    NoCaptureOfViews,
    NotForked,
}

/// Rules of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfTensor {
    Required,
    OnlyWithRouting,
    OnlyWithIds,
    /// An LL handle has no counts; its dispatch does.
    CounterAtDispatch,
    Dims,
    Exactly(Extent),
    AtLeast(Extent),
    AtMost(Extent),
    ElementType,
    Summable,
    SumsWithoutScales,
    WeighedByCaller,
    ScalesReceived,
    /// Rows that are not cast need input scales if there are output scales.
    ScalesSent,
    SameTypeOrCast,
    CastToE4m3,
    CastScaleType,
    TypeOf(Role),
    ScaleWidth,
    Pitched,
    ForwardedAsIs,
    /// No HT kernel casts rows into zones.
    NotCastByExpert,
    RowMultipleOf16,
    RowBound,
    RowAndScalesBound,
    NotNullUnlessEmpty,
    Aligned,
    /// The device can access only mapped, pinned host memory.
    MappedHostMemory,
    HoldsAllReceived,
}

/// Rules of memory that peers map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfMemory {
    NotEmpty,
    Aligned,
    Apart,
    /// The same begin and length as when the pieces in use were cut.
    AsCut,
    /// Begin and length aligned as pieces are.
    OfPieces,
    Mappable,
    InOneAllocation,
    OfGroup,
    OfOwn,
    OfGiven,
    FewerObjects,
    NotInGraphs,
}

/// An operation, as failure reports name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    LlDispatch,
    LlCombine,
    HtDispatch,
    HtCombine,
    /// The exchange of an HT handle's routing.
    HtHandle,
    /// Allocation of an object.
    MemoryNew,
    /// Its release.
    MemoryEnd,
    /// Registration of a caller's memory as an object.
    MemoryGiven,
    /// Its deregistration.
    MemoryGivenEnd,
}

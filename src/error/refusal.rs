//! Refusals as data: the refused subject and the rule that it breaks.
//!
//! The core has no names for arguments, as each ABI names them differently. An ABI puts a refusal into its own words.

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
    /// The largest row, in bytes.
    RowBytes,
    /// How low-latency combines sum.
    LlCombine,
    /// How combines add the sums of nodes.
    NodeSums,
    /// What a pass of high throughput sends to other nodes, in bytes.
    HtChunkBytes,
}

/// The subject of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Communicator,
    /// The NCCL that the process has.
    Nccl,
    Stream,
    Group,
    Handle,
    /// Whether an operation is staged.
    Staging,
    Library,
    Process,
    /// Memory for an object, or of one.
    Memory,
    MemoryBytes,
    Setting(Setting),
    /// Which operation was called.
    Operation,
    RowBytes,
    RowType,
    ScaleType,
    /// How the rows of a low-latency operation lie.
    Layout,
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
    /// The bound of received rows.
    RecvRows,
    Ranks,
    /// Elements of an input row.
    InputHidden,
    MaxTokens,
    /// Tokens per rank for which one rank's received rows are countable in 31 bits.
    CountableTokens,
    MostTopK,
    /// The smallest in low latency.
    LeastTopK,
    RowsOf(Role),
    ColumnsOf(Role),
    ExpertsOf(Role),
    /// A scale for each block of a row.
    Blocks,
}

macro_rules! rules {
    ($($kind:ident)*) => {
        /// The rule that is broken, by what it is of.
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
    /// More ranks than one node can have.
    FewerRanks,
    /// All ranks must have the same value; `rank` differs.
    Same {
        rank: GroupRank,
    },
    /// A dispatch sends ids and weights along on all ranks or on none; `rank` differs.
    SameDirection {
        rank: GroupRank,
    },
    /// Backward weights have the same number of columns on all ranks; `rank` differs.
    SameColumns {
        rank: GroupRank,
    },
    /// Repeated ids leave room at an expert for what other ranks may send; those of `rank` for `expert` do not.
    RoomForRepeated {
        rank: GroupRank,
        expert: usize,
    },
    /// The network between nodes needs a newer NCCL.
    NewEnoughForNetwork,
    /// The network between nodes needs NCCL's function `name`.
    HasForNetwork {
        name: &'static str,
    },
    /// The network between nodes needs ids that NCCL makes, not one that the environment fixes.
    OwnIdsForNetwork,
    /// `rank` refused its side with `code`.
    RefusedBy {
        rank: GroupRank,
        code: Code,
    },
}

/// Rules of a group's settings and of what the library was built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfSettings {
    /// Experts are divided equally among the ranks.
    MultipleOfRanks,
    /// A row's bound is a positive multiple of 16 bytes.
    MultipleOf16,
    /// Low latency needs a bound of tokens.
    BoundNeeded,
    /// One rank's received rows are countable in 31 bits.
    CountableRows,
    OneNode,
    /// Fewer received rows than all ranks may send are not supported.
    RoomForAllRanks,
    /// More than the low-latency kernels can count.
    LlKernelsCount,
    /// More than the high-throughput kernels can count.
    HtKernelsCount,
    HasKernels,
}

/// Rules of the order of calls, and of captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InSequence {
    GroupDestroyed,
    /// Another thread destroyed it during the call.
    DestroyedMeanwhile,
    /// A handle needs a routing before anything runs on it.
    RouteFirst,
    DispatchFirst,
    CompleteFirst,
    /// Bounds a group's pending staged operations.
    FewerStaged,
    HighThroughputOnly,
    /// Both phases of a staged operation are in the same graph, or in none.
    SameCaptureAsSend,
    /// Bounds the captures that may alternate.
    CapturesInTurn {
        most: usize,
    },
    /// No capture may discard an abandoned operation: its graph would do so at every launch.
    NoCaptureWhileGivenUp,
    /// A routing is exchanged once, but a graph runs repeatedly.
    NoCaptureOfRouting,
    /// A group is made and closed outside of graphs.
    NoCaptureOfGroup,
    /// And so are its objects.
    NoCaptureOfMemory,
    /// And so is the memory of its views.
    NoCaptureOfViews,
    /// A forked process has neither the threads nor the device of its parent.
    NotForked,
}

/// Rules of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfTensor {
    Required,
    /// A dispatch without ids delivers neither ids nor weights.
    OnlyWithRouting,
    /// A dispatch without ids sends no weights.
    OnlyWithIds,
    /// A low-latency handle counts nothing; its dispatch does.
    CounterAtDispatch,
    Dims,
    Exactly(Extent),
    AtLeast(Extent),
    AtMost(Extent),
    /// The element type is one of a few.
    ElementType,
    /// A combine sums only a few types.
    Summable,
    /// A combine sums rows, which have no scales.
    SumsWithoutScales,
    /// A combine of rank-major rows takes no weights.
    WeighedByCaller,
    /// Scales that are sent are received.
    ScalesReceived,
    /// Rows that are not cast have scales of their own, as others are written.
    ScalesSent,
    /// Rows keep their type, or are cast.
    SameTypeOrCast,
    CastToE4m3,
    /// A cast stores scales of few types.
    CastScaleType,
    TypeOf(Role),
    /// A scale has 1, 2 or 4 bytes.
    ScaleWidth,
    /// Scales are dense, or row-major or column-major with a pitch.
    Pitched,
    /// Scales that are forwarded stay as they are.
    ForwardedAsIs,
    RowMultipleOf16,
    RowBound,
    RowAndScalesBound,
    /// Only an empty tensor has no address.
    NotNullUnlessEmpty,
    Aligned,
    /// The device can access only mapped, pinned host memory.
    MappedHostMemory,
    /// The tensor has room for all received rows.
    HoldsAllReceived,
}

/// Rules of memory that peers map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfMemory {
    /// Each rank has some.
    NotEmpty,
    /// It begins where rows may begin.
    Aligned,
    /// It has nothing in common with the memory of another object.
    Apart,
    /// Other ranks cannot map memory of every kind.
    Mappable,
    InOneAllocation,
    /// It is in an object.
    OfGroup,
    /// It is the library's, of an object.
    OfOwn,
    /// It is the caller's, of an object.
    OfGiven,
    /// Bounds the objects of a group.
    FewerObjects,
    /// Objects that graphs may use stay.
    NotInGraphs,
}

/// An operation, as the report of its failure names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    LlDispatch,
    LlCombine,
    HtDispatch,
    HtCombine,
    /// The exchange of a high-throughput handle's routing.
    HtHandle,
    /// A new object.
    MemoryNew,
    /// The end of one.
    MemoryEnd,
    /// A new object of a caller's memory.
    MemoryGiven,
    /// The end of one.
    MemoryGivenEnd,
}

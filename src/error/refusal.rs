//! Refusals as data: the refused subject and the rule that it breaks.
//!
//! The core has no names for arguments, as each ABI names them differently. An ABI puts a refusal
//! into its own words.

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
    /// Low latency or high throughput.
    Algorithm,
    /// Experts over all ranks.
    Experts,
    /// Most tokens of one rank.
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
    /// The communicator.
    Communicator,
    /// The NCCL that the process has.
    Nccl,
    /// The caller's stream.
    Stream,
    /// The group.
    Group,
    /// The handle.
    Handle,
    /// Whether an operation is staged.
    Staging,
    /// This library.
    Library,
    /// The calling process.
    Process,
    /// Memory for an object, or of one.
    Memory,
    /// How much.
    MemoryBytes,
    /// A setting of the group.
    Setting(Setting),
    /// Which operation was called.
    Operation,
    /// Bytes of a row.
    RowBytes,
    /// Element type of a row.
    RowType,
    /// Element type of a row's scales.
    ScaleType,
    /// How the rows of a low-latency operation lie.
    Layout,
    /// How a low-latency combine sums.
    Variant,
    /// Whether the scales of a cast are powers of two.
    RoundScales,
    /// A tensor as a whole.
    Tensor(Role),
    /// Its number of dimensions.
    Dims(Role),
    /// The extent of one of its dimensions.
    Size(Role, usize),
    /// Its element type.
    ElementType(Role),
    /// Its strides.
    Strides(Role),
    /// Its address.
    Data(Role),
}

/// The number that an extent of a tensor is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Tokens of the handle.
    HandleTokens,
    /// Ids per token of the handle.
    HandleTopK,
    /// Experts of each rank.
    LocalExperts,
    /// The bound of received rows.
    RecvRows,
    /// Ranks of the group.
    Ranks,
    /// Elements of an input row.
    InputHidden,
    /// The bound of tokens per rank.
    MaxTokens,
    /// Tokens per rank for which one rank's received rows are countable in 31 bits.
    CountableTokens,
    /// The largest top-k.
    MostTopK,
    /// The smallest in low latency.
    LeastTopK,
    /// Rows of another tensor of the call.
    RowsOf(Role),
    /// Columns of another tensor of the call.
    ColumnsOf(Role),
    /// Experts of another tensor of the call.
    ExpertsOf(Role),
    /// A scale for each block of a row.
    Blocks,
}

/// The rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // each variant names the subject of its rules
pub enum Rule {
    AmongRanks(AmongRanks),
    OfSettings(OfSettings),
    InSequence(InSequence),
    OfTensor(OfTensor),
    OfMemory(OfMemory),
}

/// Rules of the communicator and its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // each rule names its fields
pub enum AmongRanks {
    /// It must not be NULL.
    NotNull,
    /// A communicator must be blocking.
    Blocking,
    /// More ranks than one node can have.
    FewerRanks,
    /// All ranks must have the same value; `rank` differs.
    Same { rank: GroupRank },
    /// A dispatch sends ids and weights along on all ranks or on none; `rank` differs.
    SameDirection { rank: GroupRank },
    /// Backward weights have the same number of columns on all ranks; `rank` differs.
    SameColumns { rank: GroupRank },
    /// Repeated ids leave room at an expert for what other ranks may send; those of `rank` for
    /// `expert` do not.
    RoomForRepeated { rank: GroupRank, expert: usize },
    /// The network between nodes needs a newer NCCL.
    NewEnoughForNetwork,
    /// The network between nodes needs NCCL's function `name`.
    HasForNetwork { name: &'static str },
    /// The network between nodes needs ids that NCCL makes, not one that the environment fixes.
    OwnIdsForNetwork,
    /// `rank` refused its side with `code`.
    RefusedBy { rank: GroupRank, code: Code },
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
    /// Possible within one node only.
    OneNode,
    /// Fewer received rows than all ranks may send are not supported.
    RoomForAllRanks,
    /// More than the low-latency kernels can count.
    LlKernelsCount,
    /// More than the high-throughput kernels can count.
    HtKernelsCount,
    /// The library has no kernels.
    HasKernels,
}

/// Rules of the order of calls, and of captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // each rule names its fields
pub enum InSequence {
    /// The handle's group was destroyed.
    GroupDestroyed,
    /// Another thread destroyed it during the call.
    DestroyedMeanwhile,
    /// A handle needs a routing before anything runs on it.
    RouteFirst,
    /// A combine follows a dispatch.
    DispatchFirst,
    /// Complete the handle's staged operation first.
    CompleteFirst,
    /// Bounds a group's pending staged operations.
    FewerStaged,
    /// The call is for high throughput.
    HighThroughputOnly,
    /// Both phases of a staged operation are in the same graph, or in none.
    SameCaptureAsSend,
    /// Bounds the captures that may alternate.
    CapturesInTurn { most: usize },
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
    /// The tensor is required.
    Required,
    /// A dispatch without ids delivers neither ids nor weights.
    OnlyWithRouting,
    /// A dispatch without ids sends no weights.
    OnlyWithIds,
    /// A low-latency handle counts nothing; its dispatch does.
    CounterAtDispatch,
    /// The number of dimensions is fixed.
    Dims,
    /// An extent is exactly this.
    Exactly(Extent),
    /// An extent is at least this.
    AtLeast(Extent),
    /// An extent is at most this.
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
    /// A cast gives e4m3.
    CastToE4m3,
    /// A cast stores scales of few types.
    CastScaleType,
    /// The element type is that of another tensor.
    TypeOf(Role),
    /// A scale has 1, 2 or 4 bytes.
    ScaleWidth,
    /// Scales are dense, or row-major or column-major with a pitch.
    Pitched,
    /// Scales that are forwarded stay as they are.
    ForwardedAsIs,
    /// A row is a positive multiple of 16 bytes.
    RowMultipleOf16,
    /// A row is within the group's bound.
    RowBound,
    /// A row and its scales are within the group's bound.
    RowAndScalesBound,
    /// Only an empty tensor has no address.
    NotNullUnlessEmpty,
    /// An address is aligned for the elements there.
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
    /// It is in one allocation.
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

impl From<AmongRanks> for Rule {
    fn from(rule: AmongRanks) -> Self {
        Self::AmongRanks(rule)
    }
}

impl From<OfSettings> for Rule {
    fn from(rule: OfSettings) -> Self {
        Self::OfSettings(rule)
    }
}

impl From<InSequence> for Rule {
    fn from(rule: InSequence) -> Self {
        Self::InSequence(rule)
    }
}

impl From<OfMemory> for Rule {
    fn from(rule: OfMemory) -> Self {
        Self::OfMemory(rule)
    }
}

impl From<OfTensor> for Rule {
    fn from(rule: OfTensor) -> Self {
        Self::OfTensor(rule)
    }
}

/// An operation, as the report of its failure names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Low-latency dispatch.
    LlDispatch,
    /// Low-latency combine.
    LlCombine,
    /// High-throughput dispatch.
    HtDispatch,
    /// High-throughput combine.
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

//! Refusals as data: what is refused, and the rule that it breaks.
//!
//! The core knows arguments by what they are, not by a name: each ABI calls them something else, and puts a
//! refusal into its own words.
#![forbid(unsafe_code)]

use crate::error::code::Code;

/// The part that a tensor plays in a call.
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
}

/// What is refused.
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
    /// A setting of the group.
    Setting(Setting),
    /// Which operation was called.
    Operation,
    /// Bytes of a row.
    RowBytes,
    /// Element type of a row.
    RowType,
    /// A tensor as a whole.
    Tensor(Role),
    /// Its number of dimensions.
    Dims(Role),
    /// The extent of one of its dimensions.
    Size(Role, usize),
    /// Its element type.
    ElementType(Role),
    /// Its address.
    Data(Role),
}

/// What the extent of a tensor is compared with.
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
    /// Elements of an input row.
    InputHidden,
    /// The bound of tokens per rank.
    MaxTokens,
    /// What one rank can receive, countable in 31 bits, by the number of ranks.
    CountableTokens,
    /// The largest top-k.
    MostTopK,
    /// Rows of another tensor of the call.
    RowsOf(Role),
    /// Columns of another tensor of the call.
    ColumnsOf(Role),
}

/// The rule that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Each says what its rules are of.
pub enum Rule {
    AmongRanks(AmongRanks),
    OfSettings(OfSettings),
    InSequence(InSequence),
    OfTensor(OfTensor),
}

/// Of the communicator and its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Fields, which each rule speaks of.
pub enum AmongRanks {
    /// There must be one.
    NotNull,
    /// A communicator must be blocking.
    Blocking,
    /// `rank` is on another node.
    OneNode { rank: usize },
    /// More ranks than one node can have.
    FewerRanks,
    /// All ranks must say the same; `rank` does not.
    Same { rank: usize },
    /// A dispatch sends ids and weights along on all ranks or on none; `rank` differs.
    SameDirection { rank: usize },
    /// Backward weights have as many columns on all ranks; `rank` differs.
    SameColumns { rank: usize },
    /// The network between nodes needs a newer NCCL.
    NewEnoughForNetwork,
    /// The network between nodes needs NCCL's function `name`.
    HasForNetwork { name: &'static str },
    /// `rank` refused its side with `code`.
    RefusedBy { rank: usize, code: Code },
}

/// Of a group's settings and of what the library was built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfSettings {
    /// Experts are dealt to the ranks in equal parts.
    MultipleOfRanks,
    /// A row's bound is a positive multiple of 16 bytes.
    MultipleOf16,
    /// Low latency needs a bound of tokens.
    BoundNeeded,
    /// What one rank receives is counted in 31 bits.
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

/// Of the order of calls, and of captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Fields, which each rule speaks of.
pub enum InSequence {
    /// The handle's group was destroyed.
    GroupDestroyed,
    /// Another thread destroyed it during the call.
    DestroyedMeanwhile,
    /// A handle needs a routing before anything runs on it.
    RouteFirst,
    /// A combine follows a dispatch.
    DispatchFirst,
    /// The handle's staged operation is to be completed first.
    CompleteFirst,
    /// So many staged operations of a group may wait.
    FewerStaged,
    /// The call is for high throughput.
    HighThroughputOnly,
    /// Both phases of a staged operation are in the same graph, or in none.
    SameCaptureAsSend,
    /// So many captures may take turns.
    CapturesInTurn { most: usize },
    /// A captured operation cannot receive what was given up.
    NoCaptureWhileGivenUp,
    /// A routing is exchanged once, a graph runs again and again.
    NoCaptureOfRouting,
}

/// Of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfTensor {
    /// The tensor must be there.
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
    /// FP8 rows are not supported.
    NoFp8,
    /// Scales of FP8 rows are not supported.
    NoScales,
    /// A row is a positive multiple of 16 bytes.
    RowMultipleOf16,
    /// A row keeps the group's bound.
    RowBound,
    /// Only an empty tensor has no address.
    NotNullUnlessEmpty,
    /// An address is aligned for the elements there.
    Aligned,
    /// The device can reach host memory that is mapped and pinned.
    MappedHostMemory,
    /// Received rows must all have a place.
    HoldsAllReceived,
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

impl From<OfTensor> for Rule {
    fn from(rule: OfTensor) -> Self {
        Self::OfTensor(rule)
    }
}

/// An operation as a report of its failure names it.
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
}

//! The text of each rule, to follow the argument that breaks it.

use super::{Names, code_name};
use nccl_ep_core::error::refusal::{AmongRanks, Extent, InSequence, OfMemory, OfSettings, OfTensor, Role, Rule};
use std::fmt::{self, Display, Formatter};

/// Prints the text of a rule.
pub(super) struct Text<'a> {
    pub(super) rule: Rule,
    pub(super) names: &'a Names,
}

impl Display for Text<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.rule {
            Rule::AmongRanks(rule) => among_ranks(f, rule),
            Rule::OfSettings(rule) => f.write_str(of_settings(rule)),
            Rule::InSequence(rule) => in_sequence(f, rule),
            Rule::OfTensor(rule) => of_tensor(f, rule, self.names),
            Rule::OfMemory(rule) => f.write_str(of_memory(rule)),
        }
    }
}

fn among_ranks(f: &mut Formatter<'_>, rule: AmongRanks) -> fmt::Result {
    match rule {
        AmongRanks::NotNull => f.write_str("must not be NULL"),
        AmongRanks::Blocking => f.write_str("must be a blocking communicator, as ncclCommInitRank makes"),
        AmongRanks::FewerRanks => f.write_str("has more ranks than an NVLink domain"),
        AmongRanks::NewEnoughForNetwork => f.write_str("is too old for groups that span nodes"),
        AmongRanks::OwnIdsForNetwork => f.write_str("must choose the ids of communicators for groups that span nodes"),
        AmongRanks::HasForNetwork { name } => write!(f, "has no {name}, which groups that span nodes need"),
        AmongRanks::Same { rank } => write!(f, "must be the same on every rank, but rank {rank} differs"),
        AmongRanks::SameDirection { rank } => {
            write!(f, "must be forward, or tokens only, on every rank, but rank {rank} differs")
        }
        AmongRanks::SameColumns { rank } => {
            write!(f, "must have the same columns on every rank, but rank {rank} differs")
        }
        AmongRanks::RoomForRepeated { rank, expert } => {
            write!(f, "must leave room at expert {expert} for all ranks, but rank {rank} repeats its id")
        }
        AmongRanks::RefusedBy { rank, code } => {
            let name = code_name(code);
            write!(f, "rank {rank} refused to create its own: {name}")
        }
    }
}

fn of_settings(rule: OfSettings) -> &'static str {
    match rule {
        OfSettings::MultipleOfRanks => "must be a positive multiple of the number of ranks",
        OfSettings::MultipleOf16 => "must be a positive multiple of 16",
        OfSettings::BoundNeeded => "NCCL_EP_AUTO is for high throughput only",
        OfSettings::CountableRows => "received rows must be countable in 31 bits",
        OfSettings::HoldsAllReceived => {
            "must hold all rows that this rank receives, unless NCCL_EP_OVERFLOW_DROP drops the rest"
        }
        OfSettings::OneNode => "is for groups on one node only",
        OfSettings::LlKernelsCount => "is more than the low-latency kernels can count",
        OfSettings::HtKernelsCount => "is more than the high-throughput kernels can count",
        OfSettings::HasKernels => {
            "was built without CUDA kernels, as there was no nvcc or NCCL_EP_CUDA was off; \
             NCCL_EP_CUDA=require builds them"
        }
    }
}

fn in_sequence(f: &mut Formatter<'_>, rule: InSequence) -> fmt::Result {
    f.write_str(match rule {
        InSequence::GroupDestroyed => "its group was destroyed",
        InSequence::DestroyedMeanwhile => "was destroyed meanwhile",
        InSequence::RouteFirst => "has no routing yet",
        InSequence::DispatchFirst => "needs a dispatch before its first combine",
        InSequence::CompleteFirst => "its staged operation waits for ncclEpComplete",
        InSequence::FewerStaged => "too many staged operations of the group wait for ncclEpComplete",
        InSequence::HighThroughputOnly => "is for high-throughput groups only",
        InSequence::SameCaptureAsSend => {
            "must be captured into the same graph as the staged operation's send phase, or neither"
        }
        InSequence::NoCaptureWhileGivenUp => {
            "must not be captured while an operation that was given up is to be received"
        }
        InSequence::NoCaptureOfRouting => "must not be captured into a graph: the routing is exchanged once",
        InSequence::NoCaptureOfGroup => {
            "must not be captured into a graph, or wait for a stream that is: groups begin and end once"
        }
        InSequence::NoCaptureOfMemory => {
            "maps and frees memory once: not while the default stream is captured into a graph, or \
             waits for a stream that is"
        }
        InSequence::NoCaptureOfViews => {
            "must not be captured into a graph by the group's first dispatch into a view, which makes their memory"
        }
        InSequence::NotForked => {
            "was forked after a group had been made, and cannot use this library: start it anew, in \
             Python by multiprocessing's spawn"
        }
        InSequence::CapturesInTurn { most } => {
            return write!(
                f,
                "must be in one of at most {most} captures that take turns: the order of the group's \
                 operations would be lost"
            );
        }
    })
}

fn of_memory(rule: OfMemory) -> &'static str {
    match rule {
        OfMemory::NotEmpty => "must not be 0",
        OfMemory::Aligned => "must be aligned to 16 bytes",
        OfMemory::Apart => "must have nothing in common with memory that the group has",
        OfMemory::Mappable => {
            "must be memory of cudaMalloc, or of cuMemCreate with descriptors, which other processes can map"
        }
        OfMemory::AsCut => "must be as many as when pieces in use were cut there",
        OfMemory::OfPieces => "must be a multiple of 512",
        OfMemory::InOneAllocation => "must end within the allocation that ptr is in",
        OfMemory::OfGroup => "must be in memory of ncclEpMemAlloc or ncclEpMemRegister",
        OfMemory::OfOwn => "must be what ncclEpMemAlloc gave",
        OfMemory::OfGiven => "must be what ncclEpMemRegister took",
        OfMemory::FewerObjects => "has too many pieces of memory that peers map",
        OfMemory::NotInGraphs => "stays until the group ends, as graphs have operations of the group that may use it",
    }
}

fn of_tensor(f: &mut Formatter<'_>, rule: OfTensor, names: &Names) -> fmt::Result {
    let name = names.tensor;
    let (row_bytes, tokens) = (names.row_bytes, name(Role::TokensIn));
    let (ids, weights) = (name(Role::IdsIn), name(Role::WeightsIn));
    let scales_out = name(Role::ScalesOut);
    f.write_str(match rule {
        OfTensor::Exactly(what) => return write!(f, "must be {}", Measure { what, names }),
        OfTensor::AtLeast(what) => {
            return write!(f, "must be at least {}", Measure { what, names });
        }
        OfTensor::AtMost(what) => return write!(f, "must be at most {}", Measure { what, names }),
        OfTensor::Required => "is required",
        OfTensor::OnlyWithRouting => {
            return write!(f, "needs {ids} and {weights}: a tokens-only dispatch has none");
        }
        OfTensor::OnlyWithIds => {
            return write!(f, "needs {ids}: a tokens-only dispatch has no weights");
        }
        OfTensor::CounterAtDispatch => "a low-latency handle has no counter; pass it to ncclEpDispatch",
        OfTensor::Dims => "must be the number of dimensions that this tensor has in this call",
        OfTensor::ElementType => "must be an element type that this tensor may have",
        OfTensor::Summable => "a combine sums bfloat16, float16 or float32",
        OfTensor::SumsWithoutScales => "a combine sums rows, which have no scales",
        OfTensor::WeighedByCaller => "the caller applies the weights before a combine of rank-major rows",
        OfTensor::ScalesReceived => "is required: scales that are sent must be received",
        OfTensor::ScalesSent => "is required: tokens of this type are not cast",
        OfTensor::SameTypeOrCast if !names.casts_by_types => return write!(f, "must be the type of {tokens}"),
        OfTensor::SameTypeOrCast => {
            return write!(f, "must be the type of {tokens}, or of one byte with {scales_out}");
        }
        OfTensor::CastToE4m3 => "a cast gives float8e4m3; declare that, uint8 or int8",
        OfTensor::CastScaleType => "must be float32, uint8 or int32 for a cast",
        OfTensor::TypeOf(role) => return write!(f, "must be the type of {}", name(role)),
        OfTensor::ScaleWidth => "a scale has 1, 2 or 4 bytes",
        OfTensor::Pitched => "must be dense, or row-major or column-major with a pitch",
        OfTensor::ForwardedAsIs => "scales that are forwarded cannot be rounded",
        OfTensor::NotCastByExpert => "is required: rows that lie by expert are not cast",
        OfTensor::RowAndScalesBound => {
            return write!(f, "a row with its scales must not exceed the group's {row_bytes}");
        }
        OfTensor::RowMultipleOf16 => "a row must be a positive multiple of 16 bytes",
        OfTensor::RowBound => {
            return write!(f, "a row must not exceed the group's {row_bytes}");
        }
        OfTensor::NotNullUnlessEmpty => "must not be NULL unless the tensor is empty",
        OfTensor::Aligned => "must be aligned for its elements",
        OfTensor::MappedHostMemory => "must be mapped pinned host memory",
        OfTensor::HoldsAllReceived => "must hold all tokens that this rank receives",
    })
}

/// Prints what an extent is compared with.
struct Measure<'a> {
    what: Extent,
    names: &'a Names,
}

impl Display for Measure<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let name = self.names.tensor;
        f.write_str(match self.what {
            Extent::HandleTokens => "the handle's number of tokens",
            Extent::HandleTopK => "the handle's top-k",
            Extent::LocalExperts => "the number of local experts",
            Extent::RecvRows => self.names.recv_rows,
            Extent::Ranks => "the number of ranks",
            Extent::InputHidden => "the hidden size of the input tokens",
            Extent::MaxTokens => self.names.max_tokens,
            Extent::CountableTokens => "what all ranks can send to one",
            Extent::MostTopK => "the largest top-k",
            Extent::LeastTopK => "one id per token in low latency",
            Extent::RowsOf(role) => return write!(f, "the rows of {}", name(role)),
            Extent::Blocks => "one scale for 128 or 32 elements",
            Extent::ExpertsOf(role) => return write!(f, "the experts of {}", name(role)),
            Extent::ColumnsOf(role) => return write!(f, "the columns of {}", name(role)),
        })
    }
}

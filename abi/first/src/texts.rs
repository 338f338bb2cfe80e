//! The core's refusals in the words of this ABI. `docs/errors.md` lists them all.

mod rules;

use crate::read::Tag;
use nccl_ep_core::error::refusal::{Operation, Role, Setting, Subject};
use nccl_ep_core::error::{Cause, Code, Context, Error, Value};
use std::fmt::{self, Display};

/// One line: the context, the argument, the rule, got and expected.
#[cold]
pub fn text(error: &Error) -> String {
    let report = error.report();
    let mut line = match &report.cause {
        Cause::Text(text) => text.clone(),
        Cause::Refused(subject, rule) => format!("{}: {}", Name(*subject), rules::Text(*rule)),
    };
    if let Some((got, expected)) = &report.got {
        line = format!("{line} (got {}, expected {})", value(got), value(expected));
    }
    if let Some(other) = &report.also {
        line = format!("{line}; and {}", text(other));
    }
    for context in &report.contexts {
        line = match context {
            // The call itself was the operation that failed.
            Context::Text(text) if line.starts_with(&format!("{text}: ")) => line,
            Context::Text(text) => format!("{text}: {line}"),
            Context::Running(operation) => format!("{}: {line}", operation_name(*operation)),
            Context::GroupFailed => format!("the group has failed: {line}"),
        };
    }
    line
}

fn value(value: &Value) -> String {
    match value {
        Value::Text(text) => text.clone(),
        Value::Operation(operation) => operation_name(*operation).to_owned(),
        Value::Error(error) => text(error),
    }
}

fn operation_name(operation: Operation) -> &'static str {
    match operation {
        Operation::LlDispatch => "ncclEpDispatch (low latency)",
        Operation::LlCombine => "ncclEpCombine (low latency)",
        Operation::HtDispatch => "ncclEpDispatch (high throughput)",
        Operation::HtCombine => "ncclEpCombine (high throughput)",
        Operation::HtHandle => "ncclEpCreateHandle",
    }
}

fn code_name(code: Code) -> &'static str {
    match code {
        Code::UnhandledCudaError => "ncclUnhandledCudaError",
        Code::SystemError => "ncclSystemError",
        Code::InternalError => "ncclInternalError",
        Code::InvalidArgument => "ncclInvalidArgument",
        Code::InvalidUsage => "ncclInvalidUsage",
        Code::RemoteError => "ncclRemoteError",
    }
}

/// Prints the argument of this ABI that a subject stands for.
struct Name(Subject);

impl Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Subject::Communicator => f.write_str("comm"),
            Subject::Nccl => f.write_str("NCCL"),
            Subject::Stream => f.write_str("stream"),
            Subject::Group => f.write_str("ep_group"),
            Subject::Handle => f.write_str("handle"),
            Subject::Staging => f.write_str("send_only"),
            Subject::Library => f.write_str("libnccl_ep"),
            Subject::Process => f.write_str("this process"),
            Subject::Setting(setting) => f.write_str(setting_name(setting)),
            Subject::Operation => f.write_str("operation"),
            Subject::RowBytes => f.write_str("row bytes"),
            Subject::RowType => f.write_str("data type"),
            Subject::ScaleType => f.write_str("data type of scales"),
            Subject::Layout => f.write_str("layout"),
            Subject::RoundScales => f.write_str("config.round_scales"),
            Subject::Tensor(role) => write!(f, "{}", Argument(role)),
            Subject::Dims(role) => write!(f, "{}.ndim", Argument(role)),
            Subject::Size(role, index) => write!(f, "{}.sizes[{index}]", Argument(role)),
            Subject::ElementType(role) => write!(f, "{}.datatype", Argument(role)),
            Subject::Strides(role) => write!(f, "{}.strides", Argument(role)),
            Subject::Data(role) => write!(f, "{}.data", Argument(role)),
        }
    }
}

fn setting_name(setting: Setting) -> &'static str {
    match setting {
        Setting::Algorithm => "config.algorithm",
        Setting::Experts => "config.num_experts",
        // This ABI has no separate bound of received rows.
        Setting::MaxTokens | Setting::RecvRows => "config.max_tokens_per_rank",
        Setting::RowBytes => "config.token_size_bytes",
        Setting::LlCombine => "NCCL_EP_LL_COMBINE",
        Setting::NodeSums => "NCCL_EP_NODE_SUMS",
        Setting::HtChunkBytes => "NCCL_EP_HT_CHUNK_BYTES",
    }
}

/// Prints the parameter, or the list and tag, that passes a tensor.
struct Argument(Role);

impl Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (list, tag) = match self.0 {
            Role::Ids => return f.write_str("topk_idx"),
            Role::TokensIn => ("inputs", Tag::Tokens),
            Role::TokensOut => ("outputs", Tag::Tokens),
            Role::ScalesIn => ("inputs", Tag::Scales),
            Role::ScalesOut => ("outputs", Tag::Scales),
            Role::IdsIn => ("inputs", Tag::TopkIdx),
            Role::IdsOut => ("outputs", Tag::TopkIdx),
            Role::WeightsIn => ("inputs", Tag::TopkWeights),
            Role::WeightsOut => ("outputs", Tag::TopkWeights),
            Role::TokenWeights => ("local_tensors", Tag::TopkWeights),
            Role::Counter => ("local_tensors", Tag::RecvExpertCounterDevice),
            Role::HostCounter => ("local_tensors", Tag::RecvExpertCounterHost),
        };
        write!(f, "{list}[{tag}]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_ep_core::error::refusal::{AmongRanks, Extent, OfTensor};
    use nccl_ep_core::model::ids::GroupRank;

    #[test]
    fn a_refusal_names_function_argument_rule_got_and_expected() {
        let rule = OfTensor::Exactly(Extent::RowsOf(Role::IdsOut));
        let error = Error::argument(Subject::Size(Role::WeightsOut, 0), rule)
            .got(100, 128)
            .within("ncclEpDispatch");
        assert_eq!(
            text(&error),
            "ncclEpDispatch: outputs[TOPK_WEIGHTS].sizes[0]: must be the rows of outputs[TOPK_IDX] \
             (got 100, expected 128)"
        );
    }

    #[test]
    fn failures_name_what_was_going_on() {
        let subject = Subject::Operation;
        let other = Value::Operation(Operation::LlCombine);
        let error = Error::usage(
            subject,
            AmongRanks::Same {
                rank: GroupRank::new(3),
            },
        )
        .found(Value::Operation(Operation::LlDispatch), other)
        .during(Context::Running(Operation::LlDispatch))
        .during(Context::GroupFailed)
        .within("ncclEpComplete");
        assert_eq!(
            text(&error),
            "ncclEpComplete: the group has failed: ncclEpDispatch (low latency): operation: must be \
             the same on every rank, but rank 3 differs (got ncclEpDispatch (low latency), expected \
             ncclEpCombine (low latency))"
        );
    }

    #[test]
    fn a_call_is_named_once() {
        let failed =
            Error::internal("deadline passed").during(Context::Running(Operation::HtHandle));
        assert_eq!(
            text(&failed.clone().within("ncclEpCreateHandle")),
            "ncclEpCreateHandle: deadline passed"
        );
        assert_eq!(
            text(&failed.within("ncclEpGetAsyncError")),
            "ncclEpGetAsyncError: ncclEpCreateHandle: deadline passed"
        );
    }

    #[test]
    fn a_refusal_of_another_rank_is_named_by_its_code() {
        let code = Code::InvalidUsage;
        let rank = GroupRank::new(71);
        let rule = AmongRanks::RefusedBy { rank, code };
        let error = Error::refusal(Code::RemoteError, Subject::Handle, rule)
            .and(Error::internal("another thing"));
        assert_eq!(
            text(&error),
            "handle: rank 71 refused to create its own: ncclInvalidUsage; and another thing"
        );
    }
}

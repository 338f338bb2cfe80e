//! Words the core's refusals, with an ABI's names for arguments.

mod rules;

use nccl_ep_core::error::refusal::{Operation, Role, Setting, Subject};
use nccl_ep_core::error::{Cause, Code, Context, Error, Value};
use std::fmt::{self, Display};

/// The names that differ between ABIs.
pub struct Names {
    /// The parameter, field, or list and tag that passes a tensor.
    pub tensor: fn(Role) -> &'static str,
    /// The parameter or variable of a setting.
    pub setting: fn(Setting) -> &'static str,
    /// The option that leaves an operation's receive phase for later.
    pub send_only: &'static str,
    /// The option that rounds the scales of a cast.
    pub round_scales: &'static str,
    /// Whether the types of rows ask for a cast.
    pub casts_by_types: bool,
    /// The largest row.
    pub row_bytes: &'static str,
    /// The bound on tokens per rank.
    pub max_tokens: &'static str,
    /// The rows that all ranks may send.
    pub recv_rows: &'static str,
}

/// One line: the context, the argument, the rule, got and expected.
#[cold]
pub fn text(error: &Error, names: &Names) -> String {
    let report = error.report();
    let mut line = match &report.cause {
        Cause::Text(text) => text.clone(),
        Cause::Refused(subject, rule) => {
            let rule = rules::Text { rule: *rule, names };
            format!("{}: {rule}", Name(*subject, names))
        }
    };
    if let Some((got, expected)) = &report.got {
        line = format!("{line} (got {}, expected {})", value(got, names), value(expected, names));
    }
    if let Some(other) = &report.also {
        line = format!("{line}; and {}", text(other, names));
    }
    for context in &report.contexts {
        line = match context {
            // The failed operation was the call itself.
            Context::Text(text) if line.starts_with(&format!("{text}: ")) => line,
            Context::Text(text) => format!("{text}: {line}"),
            Context::Running(operation) => format!("{}: {line}", operation_name(*operation)),
            Context::GroupFailed => format!("the group has failed: {line}"),
        };
    }
    line
}

fn value(value: &Value, names: &Names) -> String {
    match value {
        Value::Text(text) => text.clone(),
        Value::Operation(operation) => operation_name(*operation).to_owned(),
        Value::Error(error) => text(error, names),
    }
}

fn operation_name(operation: Operation) -> &'static str {
    match operation {
        Operation::LlDispatch => "ncclEpDispatch (low latency)",
        Operation::LlCombine => "ncclEpCombine (low latency)",
        Operation::HtDispatch => "ncclEpDispatch (high throughput)",
        Operation::HtCombine => "ncclEpCombine (high throughput)",
        Operation::HtHandle => "ncclEpCreateHandle",
        Operation::MemoryNew => "ncclEpMemAlloc",
        Operation::MemoryEnd => "ncclEpMemFree",
        Operation::MemoryGiven => "ncclEpMemRegister",
        Operation::MemoryGivenEnd => "ncclEpMemDeregister",
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

/// Prints the argument that a subject is.
struct Name<'a>(Subject, &'a Names);

impl Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(subject, names) = self;
        let tensor = names.tensor;
        match *subject {
            Subject::Communicator => f.write_str("comm"),
            Subject::Nccl => f.write_str("NCCL"),
            Subject::Stream => f.write_str("stream"),
            Subject::Group => f.write_str("ep_group"),
            Subject::Handle => f.write_str("handle"),
            Subject::Staging => f.write_str(names.send_only),
            Subject::Library => f.write_str("libnccl_ep"),
            Subject::Process => f.write_str("this process"),
            Subject::Memory => f.write_str("ptr"),
            Subject::MemoryBytes => f.write_str("bytes"),
            Subject::Setting(setting) => f.write_str((names.setting)(setting)),
            Subject::Operation => f.write_str("operation"),
            Subject::RowBytes => f.write_str("row bytes"),
            Subject::RowType => f.write_str("data type"),
            Subject::ScaleType => f.write_str("data type of scales"),
            Subject::Layout => f.write_str("layout"),
            Subject::ViewPlace => f.write_str("place of the view"),
            Subject::Variant => f.write_str("variant"),
            Subject::RoundScales => f.write_str(names.round_scales),
            Subject::Tensor(role) => f.write_str(tensor(role)),
            Subject::Dims(role) => write!(f, "{}.ndim", tensor(role)),
            Subject::Size(role, index) => write!(f, "{}.sizes[{index}]", tensor(role)),
            Subject::ElementType(role) => write!(f, "{}.datatype", tensor(role)),
            Subject::Strides(role) => write!(f, "{}.strides", tensor(role)),
            Subject::Data(role) => write!(f, "{}.data", tensor(role)),
        }
    }
}

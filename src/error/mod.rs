//! The one error type of the core.
//!
//! What every ABI says in the same words is a text: driver errors, deadlines, lost ranks. A refused argument is data
//! (`refusal`), which an ABI puts into words with the names that its callers know.

pub mod code;
pub mod refusal;

pub use code::Code;

use crate::error::refusal::{Operation, Rule, Subject};
use std::fmt;

/// A refusal or failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    code: Code,
    // Boxed, to keep `Result` small: successful calls also pay for the size of their error.
    report: Box<Report>,
}

/// Everything known about an error besides its code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The contexts, innermost first.
    pub contexts: Vec<Context>,
    pub cause: Cause,
    /// The found and the expected value.
    pub got: Option<(Value, Value)>,
    /// A second error that the caller must know of.
    pub also: Option<Error>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    Refused(Subject, Rule),
    Text(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Context {
    /// A text in the same words for every ABI.
    Text(String),
    /// An operation was running.
    Running(Operation),
    /// The group failed in an earlier call.
    GroupFailed,
}

/// A found or an expected value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Text(String),
    Operation(Operation),
    Error(Error),
}

/// Puts an error into the words of an ABI, for other ranks to show.
pub type Formatter = fn(&Error) -> String;

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    fn with(code: Code, cause: Cause) -> Self {
        let report = Report { contexts: Vec::new(), cause, got: None, also: None };
        Self { code, report: Box::new(report) }
    }

    /// A failure that every ABI describes by `text`.
    #[cold]
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self::with(code, Cause::Text(text.into()))
    }

    /// `subject` breaks `rule`.
    #[cold]
    pub fn argument(subject: Subject, rule: impl Into<Rule>) -> Self {
        Self::refusal(Code::InvalidArgument, subject, rule)
    }

    /// `subject` is valid in itself, but not in this mode or at this point of the sequence.
    #[cold]
    pub fn usage(subject: Subject, rule: impl Into<Rule>) -> Self {
        Self::refusal(Code::InvalidUsage, subject, rule)
    }

    /// `subject` breaks `rule`, which is a failure of class `code`.
    #[cold]
    pub fn refusal(code: Code, subject: Subject, rule: impl Into<Rule>) -> Self {
        Self::with(code, Cause::Refused(subject, rule.into()))
    }

    /// A broken invariant of this library.
    #[cold]
    pub fn internal(text: impl Into<String>) -> Self {
        Self::new(Code::InternalError, text)
    }

    /// An operating-system call failed.
    #[cold]
    pub fn system(what: impl fmt::Display, cause: &std::io::Error) -> Self {
        Self::new(Code::SystemError, format!("{what}: {cause}"))
    }

    /// Adds the found and the expected value, as texts.
    pub fn got(self, got: impl fmt::Display, expected: impl fmt::Display) -> Self {
        let [got, expected] = [got.to_string(), expected.to_string()].map(Value::Text);
        self.found(got, expected)
    }

    /// The same, as data.
    pub fn found(mut self, got: Value, expected: Value) -> Self {
        self.report.got = Some((got, expected));
        self
    }

    /// Adds a context, as text.
    pub fn within(self, what: impl fmt::Display) -> Self {
        self.during(Context::Text(what.to_string()))
    }

    /// The same, as data.
    pub fn during(mut self, context: Context) -> Self {
        self.report.contexts.push(context);
        self
    }

    /// Adds a second error that the caller must know of.
    pub fn and(mut self, other: Error) -> Self {
        self.report.also = Some(other);
        self
    }

    pub fn code(&self) -> Code {
        self.code
    }

    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The error without an ABI's words: refusals are spelled as data.
    pub fn text(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = &*self.report;
        for context in report.contexts.iter().rev() {
            match context {
                Context::Text(text) => write!(f, "{text}: ")?,
                other => write!(f, "{other:?}: ")?,
            }
        }
        match &report.cause {
            Cause::Text(text) => f.write_str(text)?,
            Cause::Refused(subject, rule) => write!(f, "{subject:?}: {rule:?}")?,
        }
        if let Some((got, expected)) = &report.got {
            write!(f, " (got {got}, expected {expected})")?;
        }
        match &report.also {
            Some(other) => write!(f, "; and {other}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Text(text) => f.write_str(text),
            Value::Operation(operation) => write!(f, "{operation:?}"),
            Value::Error(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::refusal::{OfTensor, Role};

    #[test]
    fn a_refusal_is_data_and_a_failure_is_a_text() {
        let subject = Subject::Size(Role::TokensIn, 1);
        let error = Error::argument(subject, OfTensor::RowBound).got(100, 128);
        assert_eq!(error.report().cause, Cause::Refused(subject, OfTensor::RowBound.into()));
        assert_eq!(error.code(), Code::InvalidArgument);
        assert_eq!(error.text(), "Size(TokensIn, 1): OfTensor(RowBound) (got 100, expected 128)");
        let error = Error::new(Code::RemoteError, "gone")
            .within("rank 1")
            .during(Context::Running(Operation::HtCombine))
            .and(Error::internal("worse"));
        assert_eq!(error.report().cause, Cause::Text("gone".to_owned()));
        assert_eq!(error.text(), "Running(HtCombine): rank 1: gone; and worse");
    }
}

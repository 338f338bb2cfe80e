//! The one error type of the crate.
//!
//! Every refusal becomes an `ncclResult_t` and one line of text that names function, argument, rule,
//! got and expected. This file knows how such a line is put together and nothing of who says it.
#![forbid(unsafe_code)]

use std::fmt;

/// The `ncclResult_t` values that this library returns besides success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// A CUDA call failed.
    UnhandledCudaError = 1,
    /// The operating system or a caller's allocator failed.
    SystemError = 2,
    /// A defect of this library.
    InternalError = 3,
    /// An argument breaks a rule of its own: NULL, shape, dtype, range.
    InvalidArgument = 4,
    /// The call is not possible in this mode or at this point of the sequence.
    InvalidUsage = 5,
    /// Another rank failed, or did not answer within the deadline.
    RemoteError = 6,
}

impl Code {
    /// The name of the `ncclResult_t` value.
    pub fn name(self) -> &'static str {
        match self {
            Code::UnhandledCudaError => "ncclUnhandledCudaError",
            Code::SystemError => "ncclSystemError",
            Code::InternalError => "ncclInternalError",
            Code::InvalidArgument => "ncclInvalidArgument",
            Code::InvalidUsage => "ncclInvalidUsage",
            Code::RemoteError => "ncclRemoteError",
        }
    }

    /// The code for a number that crossed a process or library boundary; unknown ones are internal.
    pub fn from_raw(raw: i32) -> Self {
        match raw {
            1 => Code::UnhandledCudaError,
            2 => Code::SystemError,
            4 => Code::InvalidArgument,
            5 => Code::InvalidUsage,
            6 => Code::RemoteError,
            _ => Code::InternalError,
        }
    }
}

/// A refusal or failure: its code and one line of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    code: Code,
    text: String,
}

/// Result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with a text of its own.
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
        }
    }

    /// `argument` breaks `rule`.
    pub fn argument(argument: impl fmt::Display, rule: impl fmt::Display) -> Self {
        Self::new(Code::InvalidArgument, format!("{argument}: {rule}"))
    }

    /// `argument` is fine in itself, but not in this mode or at this point of the sequence.
    pub fn usage(argument: impl fmt::Display, rule: impl fmt::Display) -> Self {
        Self::new(Code::InvalidUsage, format!("{argument}: {rule}"))
    }

    /// A broken invariant of this library.
    pub fn internal(text: impl Into<String>) -> Self {
        Self::new(Code::InternalError, text)
    }

    /// An operating-system call failed.
    pub fn system(what: impl fmt::Display, cause: &std::io::Error) -> Self {
        Self::new(Code::SystemError, format!("{what}: {cause}"))
    }

    /// Appends what was found and what would have been right.
    pub fn got(mut self, got: impl fmt::Display, expected: impl fmt::Display) -> Self {
        self.text
            .push_str(&format!(" (got {got}, expected {expected})"));
        self
    }

    /// Puts `prefix: ` in front: the function's name, or the rank that reported the error.
    pub fn within(mut self, prefix: impl fmt::Display) -> Self {
        self.text = format!("{prefix}: {}", self.text);
        self
    }

    /// Appends a second thing that the caller must know of.
    pub fn and(mut self, other: impl fmt::Display) -> Self {
        self.text.push_str(&format!("; and {other}"));
        self
    }

    /// The class of the failure.
    pub fn code(&self) -> Code {
        self.code
    }

    /// The line of text.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_function_argument_rule_got_and_expected() {
        let error = Error::argument("inputs[TOKENS].sizes[1]", "must equal the output's")
            .got(100, 128)
            .within("ncclEpDispatch");
        assert_eq!(
            error.text(),
            "ncclEpDispatch: inputs[TOKENS].sizes[1]: must equal the output's (got 100, expected 128)"
        );
        assert_eq!(error.code(), Code::InvalidArgument);
    }

    #[test]
    fn codes_survive_a_trip_as_numbers() {
        for code in [
            Code::UnhandledCudaError,
            Code::SystemError,
            Code::InternalError,
            Code::InvalidArgument,
            Code::InvalidUsage,
            Code::RemoteError,
        ] {
            assert_eq!(Code::from_raw(code as i32), code);
        }
        assert_eq!(Code::from_raw(99), Code::InternalError);
    }
}

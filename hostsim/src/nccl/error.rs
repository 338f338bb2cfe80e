//! NCCL result codes, and the text of the last failure of each thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

use crate::cuda::error::CudaError;
use crate::report;

pub type ncclResult_t = c_int;

/// The failures of `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    UnhandledCudaError = 1,
    SystemError = 2,
    InternalError = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
}

impl Code {
    /// The code for a number that another rank left in shared memory; `None` for 0 and unknown ones.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => return None,
            1 => Self::UnhandledCudaError,
            2 => Self::SystemError,
            4 => Self::InvalidArgument,
            5 => Self::InvalidUsage,
            6 => Self::RemoteError,
            _ => Self::InternalError,
        })
    }
}

/// A failure with its explanation.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) text: String,
}

/// Result of anything in this module tree.
pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, text)
    }
}

impl From<CudaError> for Failure {
    fn from(error: CudaError) -> Self {
        Self::new(Code::UnhandledCudaError, format!("CUDA failure {}: {error:?}", error as c_int))
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Turns an outcome into the number for C; records and maybe prints the text of a failure.
pub(crate) fn record(outcome: Outcome<()>) -> ncclResult_t {
    match outcome {
        Ok(()) => 0,
        Err(failure) => {
            report::refusal(&failure.text);
            keep(&failure.text);
            failure.code as ncclResult_t
        }
    }
}

/// Makes a text the calling thread's last one.
pub(crate) fn keep(text: &str) -> *const c_char {
    let clean = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST.with_borrow_mut(|last| {
        *last = clean;
        last.as_ptr()
    })
}

/// The text of the last failure in the calling thread, until its next one.
pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

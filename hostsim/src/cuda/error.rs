//! CUDA error numbers, their names and texts, the last error of each thread, and what every CUDA entry point does
//! around its body.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::presence;

pub type cudaError_t = c_int;

pub const CUDA_SUCCESS: cudaError_t = 0;

macro_rules! cuda_errors {
    ($($variant:ident = $number:literal, $text:literal;)*) => {
        /// The failures that the stand-ins report, with CUDA's numbers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(i32)]
        pub enum CudaError {
            $(#[doc = $text] $variant = $number,)*
        }

        fn describe(code: cudaError_t) -> (&'static str, &'static str) {
            match code {
                CUDA_SUCCESS => ("cudaSuccess\0", "no error\0"),
                $($number => (
                    concat!("cudaError", stringify!($variant), "\0"),
                    concat!($text, "\0"),
                ),)*
                _ => ("unrecognized error code\0", "unrecognized error code\0"),
            }
        }
    };
}

cuda_errors! {
    InvalidValue = 1, "invalid argument";
    MemoryAllocation = 2, "out of memory";
    InitializationError = 3, "initialization error";
    InvalidMemcpyDirection = 21, "invalid copy direction for memcpy";
    InsufficientDriver = 35, "CUDA driver version is insufficient for CUDA runtime version";
    NoDevice = 100, "no CUDA-capable device is detected";
    InvalidDevice = 101, "invalid device ordinal";
    InvalidResourceHandle = 400, "invalid resource handle";
    IllegalState = 401, "the operation cannot be performed in the present state";
    NotReady = 600, "device not ready";
    IllegalAddress = 700, "an illegal memory access was encountered";
    LaunchTimeout = 702, "the launch timed out and was terminated";
    LaunchFailure = 719, "unspecified launch failure";
    NotPermitted = 800, "operation not permitted";
    NotSupported = 801, "operation not supported";
    StreamCaptureUnsupported = 900, "operation not permitted when stream is capturing";
    StreamCaptureInvalidated = 901, "operation failed due to a previous error during capture";
    StreamCaptureMerge = 902, "operation would result in a merge of separate capture sequences";
    StreamCaptureUnmatched = 903, "capture was not ended in the same stream as it began";
    StreamCaptureUnjoined = 904, "capturing stream has unjoined work";
    StreamCaptureIsolation = 905, "dependency created on uncaptured work in another stream";
    StreamCaptureImplicit = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    CapturedEvent = 907, "operation not permitted on an event last recorded in a capturing stream";
    StreamCaptureWrongThread = 908, "attempt to terminate a thread-local capture sequence from another thread";
    Unknown = 999, "unknown error";
}

thread_local! {
    static LAST: Cell<cudaError_t> = const { Cell::new(CUDA_SUCCESS) };
    /// The last error before the most recent failure.
    static BEFORE: Cell<cudaError_t> = const { Cell::new(CUDA_SUCCESS) };
}

/// Turns a result into the number for C, and records a failure as the thread's last error.
pub(crate) fn record(result: Result<(), CudaError>) -> cudaError_t {
    match result {
        Ok(()) => CUDA_SUCCESS,
        Err(error) => {
            BEFORE.set(LAST.replace(error as cudaError_t));
            error as cudaError_t
        }
    }
}

/// Runs the body of an entry point: refuses in the presence of a GPU and in a forked process, keeps panics from
/// unwinding into C, and records a failure as the thread's last error.
pub(crate) fn boundary(body: impl FnOnce() -> Result<(), CudaError>) -> cudaError_t {
    let result = if presence::is_child() {
        Err(CudaError::InitializationError)
    } else if presence::permitted() {
        catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(CudaError::Unknown))
    } else {
        Err(CudaError::NoDevice)
    };
    record(result)
}

/// Writes a result through a caller's pointer; NULL is an invalid value.
pub(crate) fn store<T>(out: Option<&mut T>, value: T) -> Result<(), CudaError> {
    *out.ok_or(CudaError::InvalidValue)? = value;
    Ok(())
}

// SAFETY (this and every other export): the name is CUDA's or this project's own, and this library defines it once.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> cudaError_t {
    LAST.replace(CUDA_SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> cudaError_t {
    LAST.get()
}

/// Forgets the failure of the thread's last call: the previous one is the last error again. For callers that emulate
/// something without such a record.
#[unsafe(no_mangle)]
pub extern "C" fn ncclEpHostsimForgetFailure() {
    LAST.set(BEFORE.get());
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(error: cudaError_t) -> *const c_char {
    static_text(describe(error).0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(error: cudaError_t) -> *const c_char {
    static_text(describe(error).1)
}

fn static_text(text: &'static str) -> *const c_char {
    CStr::from_bytes_with_nul(text.as_bytes()).unwrap_or(c"unrecognized error code").as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(pointer: *const c_char) -> &'static str {
        // SAFETY: the functions under test return static C strings.
        unsafe { CStr::from_ptr(pointer) }.to_str().expect("UTF-8")
    }

    #[test]
    fn names_and_texts() {
        assert_eq!(text(cudaGetErrorName(0)), "cudaSuccess");
        assert_eq!(text(cudaGetErrorName(801)), "cudaErrorNotSupported");
        assert_eq!(text(cudaGetErrorString(2)), "out of memory");
        assert_eq!(text(cudaGetErrorString(12345)), "unrecognized error code");
    }

    #[test]
    fn last_error_is_taken_once() {
        record(Err(CudaError::NotReady));
        assert_eq!(record(Ok(())), CUDA_SUCCESS);
        assert_eq!(cudaPeekAtLastError(), 600);
        assert_eq!(cudaGetLastError(), 600);
        assert_eq!(cudaGetLastError(), 0);
        record(Err(CudaError::InvalidValue));
        record(Err(CudaError::NotReady));
        ncclEpHostsimForgetFailure();
        assert_eq!(cudaGetLastError(), 1);
    }
}

//! Graph capture: out of scope, and said so.
//!
//! Programs that ask whether a stream is capturing get "no"; those that start a capture get
//! `cudaErrorNotSupported` from the first call on, so they can fall back to plain launches.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_ulonglong, c_void};
use std::ptr;

use super::boundary::{boundary, store};
use super::error::{CudaError, cudaError_t};
use super::stream::{cudaStream_t, resolve};

/// `cudaStreamCaptureStatusNone`.
const NOT_CAPTURING: c_int = 0;

/// Always "not capturing".
///
/// # Safety
/// `status` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamIsCapturing(
    stream: cudaStream_t,
    status: *mut c_int,
) -> cudaError_t {
    boundary(|| {
        resolve(stream)?;
        // SAFETY: passed on under this function's contract.
        unsafe { store(status, NOT_CAPTURING) }
    })
}

/// Not supported.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamBeginCapture(_stream: cudaStream_t, _mode: c_int) -> cudaError_t {
    not_supported()
}

/// Not supported; the graph becomes NULL.
///
/// # Safety
/// `graph` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaStreamEndCapture(
    _stream: cudaStream_t,
    graph: *mut *mut c_void,
) -> cudaError_t {
    // SAFETY: passed on under this function's contract.
    boundary(|| unsafe { store(graph, ptr::null_mut()) }.and(Err(CudaError::NotSupported)))
}

/// Not supported; the executable graph becomes NULL.
///
/// # Safety
/// `executable` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGraphInstantiate(
    executable: *mut *mut c_void,
    _graph: *mut c_void,
    _flags: c_ulonglong,
) -> cudaError_t {
    // SAFETY: passed on under this function's contract.
    boundary(|| unsafe { store(executable, ptr::null_mut()) }.and(Err(CudaError::NotSupported)))
}

/// Not supported.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphLaunch(_executable: *mut c_void, _stream: cudaStream_t) -> cudaError_t {
    not_supported()
}

/// Not supported.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphDestroy(_graph: *mut c_void) -> cudaError_t {
    not_supported()
}

/// Not supported.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecDestroy(_executable: *mut c_void) -> cudaError_t {
    not_supported()
}

fn not_supported() -> cudaError_t {
    boundary(|| Err(CudaError::NotSupported))
}

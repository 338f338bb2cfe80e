//! Entry points for the capture of streams into graphs, and for graphs.
//!
//! A capture needs work that can run more than once. `libnccl_ep`'s host backend enqueues host functions that run once,
//! so captures are `cudaErrorNotSupported` until [`ncclEpHostsimAllowGraphs`] is called; programs fall back to plain
//! launches.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_ulonglong, c_void};
use std::ptr;
use std::sync::Arc;

use super::error::{CudaError, boundary, cudaError_t, store};
use super::graph::{Executable, Graph, Owned};
use super::recording::{self, Mode};
use super::stream::{cudaHostFn_t, cudaStream_t, resolve};
use crate::handles::Handles;

pub type cudaGraph_t = *mut c_void;
pub type cudaGraphExec_t = *mut c_void;

static GRAPHS: Handles<Graph> = Handles::new(0x5500_0000_0000);
static EXECUTABLES: Handles<Executable> = Handles::new(0x5600_0000_0000);

/// Allows captures from now on in this process: all work of its streams can be replayed.
#[unsafe(no_mangle)]
pub extern "C" fn ncclEpHostsimAllowGraphs() {
    recording::allow();
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamIsCapturing(stream: cudaStream_t, status: Option<&mut c_int>) -> cudaError_t {
    boundary(|| tell_capture(stream, status, None))
}

/// Whether a stream is being captured, and if so the capture's number. CUDA's function reports more, which nobody here
/// needs.
#[unsafe(no_mangle)]
pub extern "C" fn ncclEpHostsimCapture(
    stream: cudaStream_t,
    status: Option<&mut c_int>,
    number: Option<&mut c_ulonglong>,
) -> cudaError_t {
    boundary(|| tell_capture(stream, status, number))
}

/// Called for a query that is not allowed on a captured stream: an error then, and the capture is invalidated.
#[unsafe(no_mangle)]
pub extern "C" fn ncclEpHostsimRefuseCapture(stream: cudaStream_t) -> cudaError_t {
    boundary(|| {
        let stream = resolve(stream)?;
        recording::refuse_legacy(&stream)?;
        recording::refuse(&stream, CudaError::StreamCaptureUnsupported)
    })
}

/// Calls `release` with `data` once the graph that this capture becomes, and everything made from it, is destroyed.
/// Does nothing if there is no such capture.
///
/// # Safety
/// `release` may be called once with `data`, from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHostsimGiveToCapture(
    number: c_ulonglong,
    release: cudaHostFn_t,
    data: *mut c_void,
) -> cudaError_t {
    boundary(|| {
        let release = release.ok_or(CudaError::InvalidValue)?;
        let data = data as usize;
        // SAFETY: by this function's contract; a graph ends once.
        let end = move || unsafe { release(data as *mut c_void) };
        recording::give(number, || Owned(Box::new(end)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamBeginCapture(stream: cudaStream_t, mode: c_int) -> cudaError_t {
    boundary(|| {
        if !recording::is_allowed() {
            return Err(CudaError::NotSupported);
        }
        recording::begin(&resolve(stream)?, Mode::from_number(mode)?)
    })
}

/// Ends the capture that began on a stream; the graph is NULL if the capture is invalid.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamEndCapture(stream: cudaStream_t, graph: Option<&mut cudaGraph_t>) -> cudaError_t {
    boundary(|| {
        let graph = graph.ok_or(CudaError::InvalidValue)?;
        *graph = ptr::null_mut();
        if !recording::is_allowed() {
            return Err(CudaError::NotSupported);
        }
        *graph = GRAPHS.insert(Arc::new(recording::end(&resolve(stream)?)?)) as cudaGraph_t;
        Ok(())
    })
}

/// Sets the calling thread's capture mode; returns the previous one.
#[unsafe(no_mangle)]
pub extern "C" fn cudaThreadExchangeStreamCaptureMode(mode: Option<&mut c_int>) -> cudaError_t {
    boundary(|| {
        let mode = mode.ok_or(CudaError::InvalidValue)?;
        *mode = recording::exchange_mode(Mode::from_number(*mode)?) as c_int;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphInstantiate(
    executable: Option<&mut cudaGraphExec_t>,
    graph: cudaGraph_t,
    _flags: c_ulonglong,
) -> cudaError_t {
    boundary(|| {
        let executable = executable.ok_or(CudaError::InvalidValue)?;
        *executable = ptr::null_mut();
        *executable = EXECUTABLES.insert(Arc::new(Executable::new(find(&GRAPHS, graph)?)?)) as cudaGraphExec_t;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphLaunch(executable: cudaGraphExec_t, stream: cudaStream_t) -> cudaError_t {
    boundary(|| {
        let executable = find(&EXECUTABLES, executable)?;
        let stream = resolve(stream)?;
        recording::refuse(&stream, CudaError::StreamCaptureUnsupported)?;
        executable.launch(&stream)
    })
}

/// Destroys a graph; executables made from it stay.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphDestroy(graph: cudaGraph_t) -> cudaError_t {
    boundary(|| remove(&GRAPHS, graph))
}

/// Destroys an executable graph; launches under way still run.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecDestroy(executable: cudaGraphExec_t) -> cudaError_t {
    boundary(|| remove(&EXECUTABLES, executable))
}

fn find<T>(handles: &Handles<T>, handle: *mut c_void) -> Result<Arc<T>, CudaError> {
    handles.get(handle as usize).ok_or_else(unknown)
}

fn remove<T>(handles: &Handles<T>, handle: *mut c_void) -> Result<(), CudaError> {
    handles.remove(handle as usize).map(drop).ok_or_else(unknown)
}

fn unknown() -> CudaError {
    if recording::is_allowed() { CudaError::InvalidValue } else { CudaError::NotSupported }
}

fn tell_capture(
    stream: cudaStream_t,
    status: Option<&mut c_int>,
    number: Option<&mut c_ulonglong>,
) -> Result<(), CudaError> {
    // The values of `cudaStreamCaptureStatus`.
    const NONE: c_int = 0;
    const ACTIVE: c_int = 1;
    const INVALIDATED: c_int = 2;
    let stream = resolve(stream)?;
    // Unlike other calls this one does not invalidate the capture.
    if recording::is_behind_a_capture(&stream) {
        return Err(CudaError::StreamCaptureImplicit);
    }
    let capture = recording::status(&stream);
    let answer = match capture {
        None => NONE,
        Some((_, true)) => ACTIVE,
        Some((_, false)) => INVALIDATED,
    };
    if let (Some((known, _)), Some(number)) = (capture, number) {
        *number = known;
    }
    store(status, answer)
}

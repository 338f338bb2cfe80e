//! Stream entry points.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use super::device;
use super::error::{CudaError, boundary, cudaError_t, store};
use super::queue::{Kind, Stream};
use super::recording;
use crate::handles::Handles;

/// C's `cudaStream_t`: a handle, or one of the reserved values 0, 1 and 2 for default streams.
pub type cudaStream_t = *mut c_void;

/// A host function for a stream.
pub type cudaHostFn_t = Option<unsafe extern "C" fn(data: *mut c_void)>;

const NON_BLOCKING: c_uint = 1;
/// `cudaStreamPerThread`, the highest reserved value; taken as the legacy default stream.
const LAST_RESERVED: usize = 2;

static STREAMS: Handles<Stream> = Handles::new(0x5100_0000_0000);

/// The stream behind a handle; the default streams are those of the current device.
pub(crate) fn resolve(stream: cudaStream_t) -> Result<Arc<Stream>, CudaError> {
    resolve_on(stream, device::current_index())
}

/// The stream behind a handle; the default streams are those of the given device.
pub(crate) fn resolve_on(stream: cudaStream_t, index: usize) -> Result<Arc<Stream>, CudaError> {
    let handle = stream as usize;
    if handle <= LAST_RESERVED {
        return device::device(index)?.legacy();
    }
    STREAMS.get(handle).ok_or(CudaError::InvalidResourceHandle)
}

/// Invalidates all stream handles of a device.
pub(crate) fn forget(index: usize) {
    STREAMS.remove_if(|stream| stream.device == index);
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreate(stream: Option<&mut cudaStream_t>) -> cudaError_t {
    boundary(|| create_into(stream, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamCreateWithFlags(stream: Option<&mut cudaStream_t>, flags: c_uint) -> cudaError_t {
    boundary(|| create_into(stream, flags))
}

/// Ends a stream handle; work already submitted still runs.
#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamDestroy(stream: cudaStream_t) -> cudaError_t {
    boundary(|| {
        let wanted = STREAMS.get(stream as usize).ok_or(CudaError::InvalidResourceHandle)?;
        device::device(wanted.device)?.take_turn()?;
        STREAMS.remove(stream as usize).ok_or(CudaError::InvalidResourceHandle)?.close();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamSynchronize(stream: cudaStream_t) -> cudaError_t {
    boundary(|| {
        let stream = resolve(stream)?;
        refuse_in_capture(&stream)?;
        if stream.kind == Kind::Legacy {
            // The default stream is ordered with all blocking streams: an empty job waits for all of them.
            device::submit(&stream, Vec::new(), Box::new(|| Ok(())))?;
        }
        stream.drain()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceSynchronize() -> cudaError_t {
    boundary(|| {
        recording::refuse_on_device(device::current_index())?;
        device::current()?.synchronize()
    })
}

/// The same for other calls that synchronize the device; some follow the usual capture rules, others ignore captures.
#[unsafe(no_mangle)]
pub extern "C" fn ncclEpHostsimWaitForDevice(minds_captures: c_int) -> cudaError_t {
    boundary(|| {
        if minds_captures != 0 {
            recording::refuse_unsafe_call()?;
        }
        device::current()?.synchronize()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamQuery(stream: cudaStream_t) -> cudaError_t {
    boundary(|| {
        let stream = resolve(stream)?;
        refuse_in_capture(&stream)?;
        if stream.pending().is_some() { Err(CudaError::NotReady) } else { stream.take_error() }
    })
}

/// Runs a host function in stream order, on the stream's own thread. It may block for long.
///
/// # Safety
/// `function` may be called once, or once in each replay if the stream is captured, with `data` from another thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaLaunchHostFunc(
    stream: cudaStream_t,
    function: cudaHostFn_t,
    data: *mut c_void,
) -> cudaError_t {
    boundary(|| {
        let stream = resolve(stream)?;
        let function = function.ok_or(CudaError::InvalidValue)?;
        let data = data as usize;
        let job = move || {
            // SAFETY: the caller promised that the function can be called with this argument.
            unsafe { function(data as *mut c_void) };
            Ok(())
        };
        recording::enqueue(&stream, job).map(|_| ())
    })
}

/// A captured stream cannot be waited for, and waiting for another one may disturb a capture.
fn refuse_in_capture(stream: &Arc<Stream>) -> Result<(), CudaError> {
    recording::refuse(stream, CudaError::StreamCaptureUnsupported)?;
    recording::refuse_legacy(stream)?;
    recording::refuse_unsafe_call()
}

/// Creates a stream on the current device and stores its handle.
fn create_into(out: Option<&mut cudaStream_t>, flags: c_uint) -> Result<(), CudaError> {
    if out.is_none() || flags & !NON_BLOCKING != 0 {
        return Err(CudaError::InvalidValue);
    }
    let kind = if flags & NON_BLOCKING != 0 { Kind::NonBlocking } else { Kind::Blocking };
    let device = device::current()?;
    device.take_turn()?;
    let handle = STREAMS.insert(device.create_stream(kind)?);
    store(out, handle as cudaStream_t)
}

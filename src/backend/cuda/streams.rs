//! What we ask the driver about a caller's stream.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::raw_stream;
use crate::backend::cuda::table::{check, functions};
use crate::error::Result;
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ptr::null_mut;

/// A stream among all that the process has had: handles come again after a destroyed stream's end, and
/// the per-thread default stream has the same one in all threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamId(u64);

/// Which stream `stream` is. Drivers before CUDA 12 know the handle only.
pub(super) fn id_of(stream: Stream) -> Result<StreamId> {
    let Some(ask) = functions()?.cuStreamGetId else {
        return Ok(StreamId(stream.0 as u64));
    };
    let mut id = 0;
    // SAFETY: writes one number; the caller of the library vouches for the stream.
    check("cuStreamGetId", unsafe { ask(raw_stream(stream), &mut id) })?;
    Ok(StreamId(id))
}

/// One recording of work into a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capture(u64);

/// The capture that `stream` is part of, if any.
pub(super) fn capture_of(stream: Stream) -> Result<Option<Capture>> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut id = 0;
    // SAFETY: writes two numbers, the status one of the three that this enum has had in every driver;
    // what is NULL is not written.
    check("cuStreamGetCaptureInfo", unsafe {
        (functions()?.cuStreamGetCaptureInfo_v2)(
            raw_stream(stream),
            &mut status,
            &mut id,
            null_mut(),
            null_mut(),
            null_mut(),
        )
    })?;
    Ok((status == ACTIVE).then_some(Capture(id)))
}

const ACTIVE: sys::CUstreamCaptureStatus =
    sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;

/// Whether `stream` is being captured into a graph; cheaper than which one.
pub(super) fn is_capturing(stream: Stream) -> Result<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: writes one number, as above.
    check("cuStreamIsCapturing", unsafe {
        (functions()?.cuStreamIsCapturing)(raw_stream(stream), &mut status)
    })?;
    Ok(status == ACTIVE)
}

//! A stream inside a group's context, with its identity and capture.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{Status, check, functions, raw_stream};
use crate::backend::cuda::driver::context_handle::{DriverContext, Entered};
use crate::error::Result;
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ptr::null_mut;

/// The stream on which a call enqueues. While this exists, the calling thread is inside the group's context, which each
/// call enters only once.
#[derive(Debug)]
pub struct StreamScope {
    pub stream: Stream,
    /// The stream's identity; `None` if unknown, as during a capture.
    pub id: Option<StreamId>,
    /// The capture that the stream is part of now.
    pub capture: Option<Capture>,
    _entered: Entered,
}

/// A stream's identity in this process. Unlike this, handles are not unique: they are reused after a stream is
/// destroyed, and the per-thread default streams of all threads have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId(u64);

/// A capture into a graph, by its number, which is unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capture(u64);

#[cfg(test)]
impl Capture {
    pub fn numbered(number: u64) -> Self {
        Self(number)
    }
}

impl StreamScope {
    /// Enters `context` for work on `stream`, until the result is dropped.
    pub fn enter(context: &DriverContext, stream: Stream) -> Result<Self> {
        let entered = context.enter()?;
        Ok(Self::of_capture(capture_of(stream)?, stream, entered))
    }

    /// A scope for `stream`, which is about to join the capture of this one, if there is one.
    pub fn of_same_capture(&self, stream: Stream) -> Self {
        Self::of_capture(self.capture, stream, self._entered.again())
    }

    fn of_capture(capture: Option<Capture>, stream: Stream, entered: Entered) -> Self {
        let id = match capture {
            None => id_of(stream),
            // Querying the identity would invalidate the capture.
            Some(_) => None,
        };
        Self { stream, id, capture, _entered: entered }
    }

    pub fn is_captured(&self) -> bool {
        self.capture.is_some()
    }
}

fn id_of(stream: Stream) -> Option<StreamId> {
    let ask = functions().ok()?.cuStreamGetId;
    let mut id = 0;
    // SAFETY: writes one number; the caller of the library vouches for the stream.
    let status = unsafe { ask(raw_stream(stream), &mut id) };
    (status == 0).then_some(StreamId(id))
}

/// Whether a stream of the library's own is part of a capture, even of an invalidated one.
pub fn is_captured(stream: Stream) -> Result<bool> {
    capture_status(stream).map(|(status, ..)| status != NONE)
}

/// Whether a caller's stream is captured, or is the default stream during a capture that it would have to wait for.
pub fn is_in_the_way(stream: Stream) -> Result<bool> {
    let (asked, (status, ..)) = ask_capture(stream)?;
    if asked == IMPLICIT {
        return Ok(true);
    }
    check(CAPTURE_INFO, asked)?;
    Ok(status != NONE)
}

/// The graph under construction into which `stream` is captured.
pub fn graph_of(stream: Stream) -> Result<Option<sys::CUgraph>> {
    let (status, _, graph) = capture_status(stream)?;
    Ok((status == ACTIVE).then_some(graph))
}

fn capture_of(stream: Stream) -> Result<Option<Capture>> {
    let (status, id, _) = capture_status(stream)?;
    Ok((status == ACTIVE).then_some(Capture(id)))
}

/// Status, number, and graph under construction.
type CaptureInfo = (sys::CUstreamCaptureStatus, u64, sys::CUgraph);

fn capture_status(stream: Stream) -> Result<CaptureInfo> {
    let (asked, info) = ask_capture(stream)?;
    check(CAPTURE_INFO, asked).map(|()| info)
}

/// The state of `stream`'s capture; valid if the call succeeds. Allowed during every capture.
fn ask_capture(stream: Stream) -> Result<(Status, CaptureInfo)> {
    let mut status = NONE;
    let mut id = 0;
    let mut graph = null_mut();
    // SAFETY: writes two numbers and a handle, the status one of the three that this enum has had in every driver;
    // what is NULL is not written.
    let asked = unsafe {
        (functions()?.cuStreamGetCaptureInfo_v2)(
            raw_stream(stream),
            &mut status,
            &mut id,
            &mut graph,
            null_mut(),
            null_mut(),
        )
    };
    Ok((asked, (status, id, graph)))
}

const CAPTURE_INFO: &str = "cuStreamGetCaptureInfo";
const IMPLICIT: Status = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as Status;

const NONE: sys::CUstreamCaptureStatus = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
const ACTIVE: sys::CUstreamCaptureStatus = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;

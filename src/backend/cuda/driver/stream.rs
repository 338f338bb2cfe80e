//! A caller's stream as operations see it: which one it is, and whether it is being captured.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{check, functions};
use crate::backend::cuda::driver::held::{Entered, Held};
use crate::backend::cuda::driver::raw_stream;
use crate::error::Result;
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ptr::null_mut;

/// Where a call enqueues: on a stream, inside the group's context. Asked once per call; what is
/// enqueued by it needs to enter nothing more.
#[derive(Debug)]
pub struct StreamScope {
    pub stream: Stream,
    /// Which stream it is; `None` where the driver does not say: before CUDA 12, and while it is captured.
    pub id: Option<StreamId>,
    /// The capture that the stream is part of at this moment.
    pub capture: Option<Capture>,
    _entered: Entered,
}

/// A stream among all that the process has had: handles come again after a destroyed stream's end, and
/// the per-thread default stream has the same one in all threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId(u64);

/// One recording of work into a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capture(u64);

impl StreamScope {
    /// Inside `context`, on `stream`, until the result is dropped.
    pub fn enter(context: &Held, stream: Stream) -> Result<Self> {
        let _entered = context.enter()?;
        let capture = capture_of(stream)?;
        let id = match capture {
            None => id_of(stream),
            // To ask would end the capture.
            Some(_) => None,
        };
        Ok(Self {
            stream,
            id,
            capture,
            _entered,
        })
    }

    /// Whether what is enqueued goes into a graph.
    pub fn is_captured(&self) -> bool {
        self.capture.is_some()
    }
}

fn id_of(stream: Stream) -> Option<StreamId> {
    let ask = functions().ok()?.cuStreamGetId?;
    let mut id = 0;
    // SAFETY: writes one number; the caller of the library vouches for the stream.
    let status = unsafe { ask(raw_stream(stream), &mut id) };
    (status == 0).then_some(StreamId(id))
}

fn capture_of(stream: Stream) -> Result<Option<Capture>> {
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

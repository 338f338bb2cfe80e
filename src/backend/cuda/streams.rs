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

/// Which stream `stream` is; `None` where the driver does not say, as before CUDA 12.
pub(super) fn id_of(stream: Stream) -> Option<StreamId> {
    let ask = functions().ok()?.cuStreamGetId?;
    let mut id = 0;
    // SAFETY: writes one number; the caller of the library vouches for the stream.
    let status = unsafe { ask(raw_stream(stream), &mut id) };
    (status == 0).then_some(StreamId(id))
}

/// One recording of work into a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capture(u64);

/// A stream, and the capture that it is part of at this moment, if any.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) stream: Stream,
    pub(super) capture: Option<Capture>,
}

impl Place {
    /// Where a call on `stream` enqueues.
    pub(super) fn of(stream: Stream) -> Result<Self> {
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
        Ok(Self {
            stream,
            capture: (status == ACTIVE).then_some(Capture(id)),
        })
    }

    /// Whether what is enqueued goes into a graph.
    pub(super) fn is_captured(self) -> bool {
        self.capture.is_some()
    }
}

const ACTIVE: sys::CUstreamCaptureStatus =
    sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;

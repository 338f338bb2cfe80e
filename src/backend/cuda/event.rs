//! An order between two streams: what one has done when the other goes on.
#![allow(unsafe_code)]

use crate::backend::cuda::context::Context;
use crate::backend::cuda::driver::raw_stream;
use crate::backend::cuda::table::{check, functions};
use crate::error::Result;
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ptr::null_mut;
use std::sync::Arc;

/// An event without timing.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
    /// Whether it was last recorded into a graph: such a record means nothing outside.
    captured: bool,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// A new event; waiting for it before it was recorded is no wait.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes one handle.
        check("cuEventCreate", unsafe {
            (functions()?.cuEventCreate)(&mut raw, flags)
        })?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
            captured: false,
        })
    }

    /// Marks what `stream` has been given so far.
    pub(super) fn record(&mut self, stream: Stream) -> Result<()> {
        let captured = is_capturing(stream)?;
        self.record_as(captured, stream)
    }

    /// The same for a stream of which the caller knows that it is not being captured.
    pub(super) fn record_outside_graphs(&mut self, stream: Stream) -> Result<()> {
        self.record_as(false, stream)
    }

    fn record_as(&mut self, captured: bool, stream: Stream) -> Result<()> {
        self.captured = captured;
        // SAFETY: our event; the caller of the library vouches for the stream.
        check("cuEventRecord", unsafe {
            (functions()?.cuEventRecord)(self.raw, raw_stream(stream))
        })
    }

    /// Lets `stream` go on only after what was marked. A mark made inside a graph and a stream outside
    /// of it cannot be tied together, nor the reverse: there the caller orders the graph's launch.
    pub(super) fn hold(&self, stream: Stream) -> Result<()> {
        if is_capturing(stream)? != self.captured {
            return Ok(());
        }
        // SAFETY: as above.
        check("cuStreamWaitEvent", unsafe {
            (functions()?.cuStreamWaitEvent)(raw_stream(stream), self.raw, 0)
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // A context that is gone has destroyed its events.
        if let (Ok(_entered), Ok(functions)) = (self.context.enter(), functions()) {
            // SAFETY: made by `new`, destroyed once.
            unsafe { (functions.cuEventDestroy_v2)(self.raw) };
        }
    }
}

/// Whether `stream` is being captured into a graph.
pub(super) fn is_capturing(stream: Stream) -> Result<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: writes one number, one of the three that this enum has had in every driver.
    check("cuStreamIsCapturing", unsafe {
        (functions()?.cuStreamIsCapturing)(raw_stream(stream), &mut status)
    })?;
    Ok(status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE)
}

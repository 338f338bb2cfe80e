//! An order between two streams: what one has done when the other goes on.
#![allow(unsafe_code)]

use crate::backend::cuda::context::Context;
use crate::backend::cuda::driver::raw_stream;
use crate::backend::cuda::streams::{Capture, capture_of};
use crate::backend::cuda::table::{check, functions};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ptr::null_mut;
use std::sync::Arc;

/// An event without timing.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    raw: sys::CUevent,
    /// The capture in which it was last recorded: such a record means something in that graph alone.
    capture: Option<Capture>,
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
            capture: None,
        })
    }

    /// Marks what `stream` has been given so far.
    pub(super) fn record(&mut self, stream: Stream) -> Result<()> {
        self.capture = capture_of(stream)?;
        self.record_now(stream)
    }

    /// The same for a stream of which the caller knows that it is not being captured.
    pub(super) fn record_outside_graphs(&mut self, stream: Stream) -> Result<()> {
        self.capture = None;
        self.record_now(stream)
    }

    fn record_now(&self, stream: Stream) -> Result<()> {
        // SAFETY: our event; the caller of the library vouches for the stream.
        check("cuEventRecord", unsafe {
            (functions()?.cuEventRecord)(self.raw, raw_stream(stream))
        })
    }

    /// Lets `stream` go on only after what was marked. Marks and streams of different graphs, or inside
    /// and outside of one, cannot be tied together: there the caller orders the launches of graphs.
    pub(super) fn hold(&self, stream: Stream) -> Result<()> {
        if capture_of(stream)? != self.capture {
            return Ok(());
        }
        self.wait(stream)
    }

    /// The same where nothing makes sense without that order. A stream that has not joined the capture
    /// of the mark joins it.
    pub(super) fn hold_or_refuse(&self, stream: Stream) -> Result<()> {
        let capture = capture_of(stream)?;
        if capture == self.capture {
            return self.wait(stream);
        }
        // Of a capture that has ended the driver refuses this, and nothing else happens.
        if capture.is_none() && self.wait(stream).is_ok() {
            return Ok(());
        }
        Err(Error::usage(
            "stream",
            "must be captured into the same graph as the staged operation's send phase, or neither",
        ))
    }

    fn wait(&self, stream: Stream) -> Result<()> {
        // SAFETY: as for recording.
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

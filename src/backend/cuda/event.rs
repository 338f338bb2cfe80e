//! An order between two streams: what one has done when the other goes on.
#![allow(unsafe_code)]

use crate::backend::cuda::context::Context;
use crate::backend::cuda::driver::raw_stream;
use crate::backend::cuda::streams::{Capture, Place, StreamId};
use crate::backend::cuda::table::{check, functions};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::ptr::null_mut;
use std::sync::Arc;

/// A mark in what streams have been given, or in what a graph holds. A mark within a graph means
/// something in that graph alone, so it does not take the place of the one outside.
#[derive(Debug)]
pub(super) struct Event {
    outside: Mark,
    inside: Mark,
    /// The capture of the last mark inside.
    captured: Option<Capture>,
    /// Where the last mark of both is.
    latest: Option<Capture>,
}

impl Event {
    /// A new event; waiting for it before it was recorded is no wait.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self {
            outside: Mark::new(context)?,
            inside: Mark::new(context)?,
            captured: None,
            latest: None,
        })
    }

    /// Marks what the stream has been given so far.
    pub(super) fn record(&mut self, at: &Place) -> Result<()> {
        match at.capture {
            None => self.outside.record(at)?,
            Some(capture) => {
                self.inside.record(at)?;
                self.captured = Some(capture);
            }
        }
        self.latest = at.capture;
        Ok(())
    }

    /// Lets the stream go on only after what was marked, and says whether it does. Marks and streams of
    /// different graphs, or inside and outside of one, cannot be tied together: there the caller orders
    /// the launches of graphs.
    pub(super) fn hold(&self, at: &Place) -> Result<bool> {
        match at.capture {
            None => self.outside.hold(at)?,
            Some(_) if at.capture == self.captured => self.inside.hold(at)?,
            Some(_) => return Ok(false),
        }
        Ok(true)
    }

    /// The same where nothing makes sense without that order.
    pub(super) fn hold_or_refuse(&self, at: &Place) -> Result<()> {
        if at.capture == self.latest {
            return self.hold(at).map(drop);
        }
        Err(Error::usage(
            "stream",
            "must be captured into the same graph as the staged operation's send phase, or neither",
        ))
    }
}

/// One of the driver's events, without timing, and the stream that it was last recorded on.
#[derive(Debug)]
struct Mark {
    context: Arc<Context>,
    raw: sys::CUevent,
    on: Option<StreamId>,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Mark {}

impl Mark {
    fn new(context: &Arc<Context>) -> Result<Self> {
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
            on: None,
        })
    }

    fn record(&mut self, at: &Place) -> Result<()> {
        // SAFETY: our event; the caller of the library vouches for the stream.
        check("cuEventRecord", unsafe {
            (functions()?.cuEventRecord)(self.raw, raw_stream(at.stream))
        })?;
        self.on = at.id;
        Ok(())
    }

    /// On one stream there is nothing to wait for. Where that is not known, in graphs above all, the wait
    /// is enqueued and costs the device nothing (`docs/performance.md`).
    fn hold(&self, at: &Place) -> Result<()> {
        if at.id.is_some() && at.id == self.on {
            return Ok(());
        }
        // SAFETY: as for recording.
        check("cuStreamWaitEvent", unsafe {
            (functions()?.cuStreamWaitEvent)(raw_stream(at.stream), self.raw, 0)
        })
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // A context that is gone has destroyed its events.
        if let (Ok(_entered), Ok(functions)) = (self.context.enter(), functions()) {
            // SAFETY: made by `new`, destroyed once.
            unsafe { (functions.cuEventDestroy_v2)(self.raw) };
        }
    }
}

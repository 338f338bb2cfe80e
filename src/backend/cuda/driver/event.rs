//! An order between two streams: what one has done when the other goes on.
#![allow(unsafe_code)]

use crate::backend::StreamMark;
use crate::backend::cuda::driver::api::{check, functions};
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::stream::{Capture, StreamId, StreamScope};
use crate::backend::cuda::driver::{NOT_READY, raw_stream};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ffi::c_uint;
use std::ptr::null_mut;
use std::sync::Arc;

/// Captures whose marks are kept at a time, those that were used last.
const KEPT: usize = 4;
/// How many others are remembered, so that one that comes back is refused.
const REMEMBERED: usize = 60;

/// A mark in what streams have been given, or in what a graph holds. A mark within a graph means
/// something in that graph alone, so it takes neither the place of the one outside nor of another graph's.
#[derive(Debug)]
pub struct Event {
    outside: Mark,
    inside: Inside,
    /// Where the last mark of all is.
    latest: Option<Capture>,
    is_in_graphs: bool,
}

impl Event {
    /// A new event; waiting for it before it was recorded is no wait.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self {
            outside: Mark::new(context)?,
            inside: Inside::new(context)?,
            latest: None,
            is_in_graphs: false,
        })
    }

    /// Marks what the stream has been given so far.
    pub fn record(&mut self, at: &StreamScope) -> Result<()> {
        match at.capture {
            None => self.outside.record(at)?,
            Some(capture) => self.inside.record(capture, at)?,
        }
        self.latest = at.capture;
        self.is_in_graphs |= at.is_captured();
        Ok(())
    }

    /// Whether everything has run that was marked outside of graphs.
    pub fn is_over(&self) -> Result<bool> {
        self.outside.is_over()
    }

    /// Whether anything was marked in a graph.
    pub fn is_in_graphs(&self) -> bool {
        self.is_in_graphs
    }

    /// Lets the stream go on only after what was marked, and says whether it does. Marks and streams of
    /// different graphs, or inside and outside of one, cannot be tied together: there the caller orders
    /// the launches of graphs. Refuses a capture whose mark is lost.
    pub fn hold(&self, at: &StreamScope) -> Result<bool> {
        match at.capture {
            None => self.outside.hold(at).map(|()| true),
            Some(capture) => self.inside.hold(capture, at),
        }
    }

    /// The same where nothing makes sense without that order.
    pub fn hold_or_refuse(&self, at: &StreamScope) -> Result<()> {
        if at.capture == self.latest {
            return self.hold(at).map(drop);
        }
        Err(Error::usage(Subject::Stream, InSequence::SameCaptureAsSend))
    }
}

/// The last mark in each of the captures that take turns. Nobody says when one ends, so its place goes to
/// another when that needs it.
#[derive(Debug)]
struct Inside {
    kept: [Kept; KEPT],
    /// Marks so far.
    records: u64,
    /// Captures that lost their place, as a ring.
    displaced: [Option<Capture>; REMEMBERED],
    displacements: usize,
}

#[derive(Debug)]
struct Kept {
    capture: Option<Capture>,
    mark: Mark,
    /// `Inside::records` at the time of the mark.
    record: u64,
}

impl Inside {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let unused = || {
            Ok(Kept {
                capture: None,
                mark: Mark::new(context)?,
                record: 0,
            })
        };
        Ok(Self {
            kept: [unused()?, unused()?, unused()?, unused()?],
            records: 0,
            displaced: [None; REMEMBERED],
            displacements: 0,
        })
    }

    fn record(&mut self, capture: Capture, at: &StreamScope) -> Result<()> {
        self.records += 1;
        let own = |kept: &Kept| kept.capture == Some(capture);
        let place = match self.kept.iter().position(own) {
            Some(place) => self.kept.get_mut(place),
            None => self.kept.iter_mut().min_by_key(|kept| kept.record),
        };
        let kept = place.ok_or_else(|| Error::internal("no place for a mark"))?;
        kept.mark.record(at)?;
        kept.record = self.records;
        let before = kept.capture.replace(capture);
        if before.is_some() && before != Some(capture) {
            let turn = self.displacements % REMEMBERED;
            self.displacements += 1;
            if let Some(displaced) = self.displaced.get_mut(turn) {
                *displaced = before;
            }
        }
        Ok(())
    }

    /// A capture without a mark has nothing to wait for, unless its mark is lost.
    fn hold(&self, capture: Capture, at: &StreamScope) -> Result<bool> {
        let own = |kept: &&Kept| kept.capture == Some(capture);
        if let Some(kept) = self.kept.iter().find(own) {
            return kept.mark.hold(at).map(|()| true);
        }
        if !self.displaced.contains(&Some(capture)) {
            return Ok(false);
        }
        Err(Error::usage(
            Subject::Stream,
            InSequence::CapturesInTurn { most: KEPT },
        ))
    }
}

/// One of the driver's events, without timing, and the stream that it was last recorded on.
#[derive(Debug)]
pub struct Mark {
    context: Arc<Context>,
    raw: sys::CUevent,
    on: Option<StreamId>,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Mark {}

impl Mark {
    /// One that marks nothing yet.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
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

    /// A mark behind everything that `stream` has been given so far.
    pub fn behind(context: &Arc<Context>, stream: Stream) -> Result<Self> {
        let mut mark = Self::new(context)?;
        mark.record(&StreamScope::enter(context, stream)?)?;
        Ok(mark)
    }

    /// Whether what was marked has run; also if it has ended in an error.
    pub fn is_over(&self) -> Result<bool> {
        let _entered = self.context.enter()?;
        // SAFETY: our event.
        let status = unsafe { (functions()?.cuEventQuery)(self.raw) };
        if status == NOT_READY {
            return Ok(false);
        }
        check("cuEventQuery", status).map(|()| true)
    }

    fn record(&mut self, at: &StreamScope) -> Result<()> {
        // SAFETY: our event; the caller of the library vouches for the stream.
        check("cuEventRecord", unsafe {
            (functions()?.cuEventRecord)(self.raw, raw_stream(at.stream))
        })?;
        self.on = at.id;
        Ok(())
    }

    /// On one stream there is nothing to wait for. Where that is not known, in graphs above all, the wait
    /// is enqueued and costs the device nothing (`docs/development/host-time.md`).
    fn hold(&self, at: &StreamScope) -> Result<()> {
        if at.id.is_some() && at.id == self.on {
            return Ok(());
        }
        // SAFETY: as for recording.
        check("cuStreamWaitEvent", unsafe {
            (functions()?.cuStreamWaitEvent)(raw_stream(at.stream), self.raw, 0)
        })
    }
}

impl StreamMark for Mark {
    fn record(&mut self, stream: Stream) -> Result<bool> {
        let context = Arc::clone(&self.context);
        let at = StreamScope::enter(&context, stream)?;
        if at.is_captured() {
            return Ok(false);
        }
        Mark::record(self, &at).map(|()| true)
    }

    fn is_over(&self) -> Result<bool> {
        let _apart = ApartFromCaptures::enter()?;
        Mark::is_over(self)
    }
}

/// As long as this lives the calling thread may ask about events while any thread captures. Otherwise that would
/// end a capture in the mode that is the runtime's default.
struct ApartFromCaptures(c_uint);

impl ApartFromCaptures {
    fn enter() -> Result<Self> {
        const RELAXED: c_uint = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        exchange_mode(RELAXED).map(Self)
    }
}

impl Drop for ApartFromCaptures {
    fn drop(&mut self) {
        // The same call has succeeded before.
        let _ = exchange_mode(self.0);
    }
}

/// Sets how this thread minds captures; gives how it did before.
fn exchange_mode(mode: c_uint) -> Result<c_uint> {
    let mut mode = mode;
    if let Some(exchange) = functions()?.cuThreadExchangeStreamCaptureMode {
        // SAFETY: reads and writes one number.
        let status = unsafe { exchange(&mut mode) };
        check("cuThreadExchangeStreamCaptureMode", status)?;
    }
    Ok(mode)
}

impl Drop for Mark {
    fn drop(&mut self) {
        // A context that is gone has destroyed its events.
        if let (Some(_entered), Ok(functions)) = (self.context.enter_if_alive(), functions()) {
            // SAFETY: made by `new`, destroyed once.
            unsafe { (functions.cuEventDestroy_v2)(self.raw) };
        }
    }
}

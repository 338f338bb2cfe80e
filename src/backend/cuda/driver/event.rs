//! Order between streams: one waits for the work that another had at a recorded point.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{NOT_READY, call, check, functions, raw_stream};
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::stream::{Capture, StreamId, StreamScope};
use crate::backend::device::StreamMark;
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ptr::null_mut;
use std::sync::Arc;

/// How many captures may take turns: only the most recently used ones keep their marks.
pub const MOST_CAPTURES: usize = 4;
/// How many displaced captures are remembered, so that one that comes back is refused.
const REMEMBERED: usize = 60;

/// A mark in the work of streams, or of a graph. A mark inside a graph means something in that graph only, so it
/// replaces neither the mark outside nor that of another graph.
#[derive(Debug)]
pub struct Event {
    outside: Mark,
    inside: Inside,
    /// Where the most recent mark is.
    latest: Option<Capture>,
    is_in_graphs: bool,
}

impl Event {
    /// A new event. Waiting for it before it is recorded has no effect.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self { outside: Mark::new(context)?, inside: Inside::new(context)?, latest: None, is_in_graphs: false })
    }

    /// Marks the present end of the stream's work.
    pub fn record(&mut self, at: &StreamScope) -> Result<()> {
        match at.capture {
            None => self.outside.record(at)?,
            Some(capture) => self.inside.record(capture, at)?,
        }
        self.latest = at.capture;
        self.is_in_graphs |= at.is_captured();
        Ok(())
    }

    /// Whether all work that was marked outside of graphs has run.
    pub fn is_over(&self) -> Result<bool> {
        self.outside.is_over()
    }

    /// Whether anything was ever marked in a graph. Whether that graph still exists is not tracked: the user object
    /// that would tell costs each of its launches 3 us (2 H100s).
    pub fn is_in_graphs(&self) -> bool {
        self.is_in_graphs
    }

    /// Makes the stream wait for the marked work; returns whether it does. No wait is possible between different
    /// graphs, or between the inside and the outside of one: there the caller orders the launches. Refuses a capture
    /// whose mark is lost.
    pub fn hold(&self, at: &StreamScope) -> Result<bool> {
        match at.capture {
            None => self.outside.hold(at).map(|()| true),
            Some(capture) => self.inside.hold(capture, at),
        }
    }

    /// The same for work that needs that order.
    pub fn hold_or_refuse(&self, at: &StreamScope) -> Result<()> {
        if at.capture == self.latest {
            return self.hold(at).map(drop);
        }
        Err(Error::usage(Subject::Stream, InSequence::SameCaptureAsSend))
    }
}

/// The last mark in each of the captures that take turns. The end of a capture is not reported, so its place is reused
/// when another capture needs one.
#[derive(Debug)]
struct Inside {
    kept: [Kept; MOST_CAPTURES],
    /// Number of marks so far.
    records: u64,
    /// Captures that lost their place, as a ring buffer.
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
        let unused = || Ok(Kept { capture: None, mark: Mark::new(context)?, record: 0 });
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
        let kept = match self.kept.iter().position(own) {
            Some(index) => self.kept.get_mut(index),
            None => self.kept.iter_mut().min_by_key(|kept| kept.record),
        };
        let kept = kept.ok_or_else(|| Error::internal("no place for a mark"))?;
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

    /// A capture without a mark has nothing to wait for, unless its mark was lost.
    fn hold(&self, capture: Capture, at: &StreamScope) -> Result<bool> {
        let own = |kept: &&Kept| kept.capture == Some(capture);
        if let Some(kept) = self.kept.iter().find(own) {
            return kept.mark.hold(at).map(|()| true);
        }
        if !self.displaced.contains(&Some(capture)) {
            return Ok(false);
        }
        Err(Error::usage(Subject::Stream, InSequence::CapturesInTurn { most: MOST_CAPTURES }))
    }
}

/// A driver event without timing: a point in a stream's work that others can wait for. The calling thread is inside the
/// context.
///
/// It may be used directly if each wait is enqueued in the call that records it, or later in the same operation: then
/// marks inside a graph are only used there, and none outlives its operation.
#[derive(Debug)]
pub struct DriverEvent {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for DriverEvent {}

impl DriverEvent {
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes one handle.
        unsafe { call!(cuEventCreate(&mut raw, flags))? };
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// Marks the present end of the work of `stream`.
    pub fn record(&mut self, stream: Stream) -> Result<()> {
        // SAFETY: our event; the caller of the library vouches for its stream, others are ours.
        unsafe { call!(cuEventRecord(self.raw, raw_stream(stream))) }
    }

    /// Makes `stream` wait for the marked work; if that is captured, `stream` joins the capture.
    pub fn hold(&self, stream: Stream) -> Result<()> {
        // SAFETY: as for recording.
        unsafe { call!(cuStreamWaitEvent(raw_stream(stream), self.raw, 0)) }
    }

    /// Makes `to` wait for the present work of `from`.
    pub fn join(&mut self, from: Stream, to: Stream) -> Result<()> {
        self.record(from)?;
        self.hold(to)
    }

    /// Whether the marked work has run; also if it ended in an error.
    fn is_over(&self) -> Result<bool> {
        // SAFETY: our event.
        let status = unsafe { (functions()?.cuEventQuery)(self.raw) };
        if status == NOT_READY { Ok(false) } else { check("cuEventQuery", status).map(|()| true) }
    }
}

impl Drop for DriverEvent {
    fn drop(&mut self) {
        // A context that is gone has destroyed its events.
        self.context.destroy(self.raw as usize, |raw| {
            if let Ok(functions) = functions() {
                // SAFETY: made by `new`, destroyed once.
                unsafe { (functions.cuEventDestroy_v2)(raw as sys::CUevent) };
            }
        });
    }
}

/// An event, and the stream that it was last recorded on.
#[derive(Debug)]
pub struct Mark {
    event: DriverEvent,
    on: Option<StreamId>,
}

impl Mark {
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self { event: DriverEvent::new(context)?, on: None })
    }

    /// Whether the marked work has run; also if it ended in an error, or with its context.
    pub fn is_over(&self) -> Result<bool> {
        match self.event.context.enter_if_alive() {
            None => Ok(true),
            Some(_entered) => self.event.is_over(),
        }
    }

    fn record(&mut self, at: &StreamScope) -> Result<()> {
        self.event.record(at.stream)?;
        self.on = at.id;
        Ok(())
    }

    /// On the same stream no wait is needed. If the stream is unknown, mainly in graphs, the wait is enqueued and costs
    /// the device nothing (`docs/development/host-time.md`).
    fn hold(&self, at: &StreamScope) -> Result<()> {
        if at.id.is_some() && at.id == self.on { Ok(()) } else { self.event.hold(at.stream) }
    }
}

impl StreamMark for Mark {
    fn record(&mut self, stream: Stream) -> Result<bool> {
        let context = Arc::clone(&self.event.context);
        let at = StreamScope::enter(&context.held, stream)?;
        if at.is_captured() { Ok(false) } else { Mark::record(self, &at).map(|()| true) }
    }

    fn is_over(&self) -> Result<bool> {
        Mark::is_over(self)
    }
}

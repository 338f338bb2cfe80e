//! Events, also across captures: a stream waits for the work that another stream had at a recorded point.
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

/// How many captures may alternate: only the most recently used ones keep their marks.
pub const MOST_CAPTURES: usize = 4;
/// How many captures whose marks were displaced are remembered, so that a later use of them is refused.
const REMEMBERED: usize = 60;

/// A mark in the work of streams outside graphs, and one in each of several captures. A mark in a capture is only valid
/// in its graph, so it replaces neither the mark outside nor that of another capture.
#[derive(Debug)]
pub struct Event {
    outside: Mark,
    inside: Inside,
    /// The capture of the most recent mark; `None` outside.
    latest: Option<Capture>,
    is_in_graphs: bool,
}

impl Event {
    /// A new event. Until it is recorded, waiting for it has no effect.
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

    /// Whether the work marked outside graphs has run.
    pub fn is_over(&self) -> Result<bool> {
        self.outside.is_over()
    }

    /// Whether anything was ever marked in a graph. Whether the graph still exists is not tracked: a user object that
    /// reports its end costs each launch of the graph 3 us (2 H100s).
    pub fn is_in_graphs(&self) -> bool {
        self.is_in_graphs
    }

    /// Makes the stream wait for the marked work; returns whether it does. Between different graphs, or between a graph
    /// and work outside, no wait is possible, and the caller has to order the launches. An error if the capture's mark
    /// was displaced.
    pub fn make_wait(&self, at: &StreamScope) -> Result<bool> {
        match at.capture {
            None => self.outside.make_wait(at).map(|()| true),
            Some(capture) => self.inside.make_wait(capture, at),
        }
    }

    /// As [`Self::make_wait`], but an error if no wait is possible.
    pub fn hold_or_refuse(&self, at: &StreamScope) -> Result<()> {
        if at.capture == self.latest {
            return self.make_wait(at).map(drop);
        }
        Err(Error::usage(Subject::Stream, InSequence::SameCaptureAsSend))
    }
}

/// The last marks of the captures used most recently. The library does not learn of a capture's end, so a capture's
/// entry is reused when another capture needs one.
#[derive(Debug)]
struct Inside {
    captured: [CapturedMark; MOST_CAPTURES],
    /// Number of marks so far.
    records: u64,
    /// Captures whose marks were displaced, as a ring buffer.
    displaced: [Option<Capture>; REMEMBERED],
    displacements: usize,
}

#[derive(Debug)]
struct CapturedMark {
    capture: Option<Capture>,
    mark: Mark,
    /// `Inside::records` when the mark was recorded.
    record: u64,
}

impl Inside {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let unused = || Ok(CapturedMark { capture: None, mark: Mark::new(context)?, record: 0 });
        Ok(Self {
            captured: [unused()?, unused()?, unused()?, unused()?],
            records: 0,
            displaced: [None; REMEMBERED],
            displacements: 0,
        })
    }

    fn record(&mut self, capture: Capture, at: &StreamScope) -> Result<()> {
        self.records += 1;
        let own = |captured: &CapturedMark| captured.capture == Some(capture);
        let captured = match self.captured.iter().position(own) {
            Some(index) => self.captured.get_mut(index),
            None => self.captured.iter_mut().min_by_key(|captured| captured.record),
        };
        let captured = captured.ok_or_else(|| Error::internal("no place for a mark"))?;
        captured.mark.record(at)?;
        captured.record = self.records;
        let before = captured.capture.replace(capture);
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
    fn make_wait(&self, capture: Capture, at: &StreamScope) -> Result<bool> {
        let own = |captured: &&CapturedMark| captured.capture == Some(capture);
        if let Some(captured) = self.captured.iter().find(own) {
            return captured.mark.make_wait(at).map(|()| true);
        }
        if !self.displaced.contains(&Some(capture)) {
            return Ok(false);
        }
        Err(Error::usage(Subject::Stream, InSequence::CapturesInTurn { most: MOST_CAPTURES }))
    }
}

/// A driver event without timing: a point in a stream's work that other streams can wait for. The calling thread must
/// be inside the context.
///
/// To be used directly only if each wait is enqueued in the call that records the event, or later in the same
/// operation. Then marks in a graph are only used in that graph.
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

    /// Marks the present end of the work on `stream`.
    pub fn record(&mut self, stream: Stream) -> Result<()> {
        // SAFETY: our event; the caller of the library vouches for its stream, others are ours.
        unsafe { call!(cuEventRecord(self.raw, raw_stream(stream))) }
    }

    /// Makes `stream` wait for the marked work; if that is captured, `stream` joins the capture.
    pub fn make_wait(&self, stream: Stream) -> Result<()> {
        // SAFETY: as for recording.
        unsafe { call!(cuStreamWaitEvent(raw_stream(stream), self.raw, 0)) }
    }

    /// Makes `to` wait for the work that is now enqueued on `from`.
    pub fn join(&mut self, from: Stream, to: Stream) -> Result<()> {
        self.record(from)?;
        self.make_wait(to)
    }

    /// Whether the marked work has ended, possibly with an error.
    fn is_over(&self) -> Result<bool> {
        // SAFETY: our event.
        let status = unsafe { (functions()?.cuEventQuery)(self.raw) };
        if status == NOT_READY { Ok(false) } else { check("cuEventQuery", status).map(|()| true) }
    }
}

impl Drop for DriverEvent {
    fn drop(&mut self) {
        // Events of a context that is gone no longer exist.
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

    /// Whether the marked work has ended, possibly with an error, or with its context.
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

    /// Makes `at` wait, unless it is the same stream. If the stream's identity is unknown, as in graphs, the wait costs
    /// the device nothing (`docs/development/host-time.md`).
    fn make_wait(&self, at: &StreamScope) -> Result<()> {
        if at.id.is_some() && at.id == self.on { Ok(()) } else { self.event.make_wait(at.stream) }
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

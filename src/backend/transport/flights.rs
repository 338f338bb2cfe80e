//! Operations that were enqueued and have not run yet, and how long the first of them has run.
//!
//! Operations of a transport run one after the other. So time counts for the first alone: since its stream has come
//! to it, and since the one before it was over.
//!
//! Marks are recorded outside of the lock: a stream that takes no more holds up who enqueues, and the watchdog, which
//! must end what the stream waits for, needs the lock.
#![forbid(unsafe_code)]

use crate::backend::quiet::{Graphs, Works};
use crate::backend::transport::Label;
use crate::backend::transport::operation::{Late, Operation, Recent, distinct};
use crate::backend::transport::replays::{InGraphs, Replays};
use crate::backend::{DeviceMemory, StreamMark};
use crate::error::Result;
use crate::model::ops::Stream;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How many operations are under way before a call looks whether some of them are over. The watchdog looks at other times.
const MANY: usize = 64;

/// What was enqueued, in its order.
#[derive(Default)]
pub struct Flights {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    under_way: VecDeque<Flight>,
    /// Those that are over, to be used again.
    spare: Vec<Flight>,
    operations: u64,
    /// An operation is about to be among those under way.
    is_beginning: bool,
    /// Those that were captured into graphs.
    replays: Replays,
}

struct Flight {
    operation: Operation,
    /// The ranks that it exchanges with, some more than once.
    peers: Vec<usize>,
    begin: Box<dyn StreamMark>,
    /// Not here while it is recorded.
    end: Option<Box<dyn StreamMark>>,
    /// The call that enqueues it has returned, and the end is marked.
    is_enqueued: bool,
    /// When it was first seen to run.
    seen: Option<Instant>,
}

impl Flights {
    /// No operations yet, over `memory`.
    pub fn new(memory: &dyn DeviceMemory) -> Result<Self> {
        let state = State {
            replays: Replays::new(memory)?,
            ..State::default()
        };
        Ok(Self {
            state: Mutex::new(state),
        })
    }

    /// An operation with `peers` is about to be enqueued on `stream`.
    pub fn begin(
        &self,
        memory: &dyn DeviceMemory,
        label: Label,
        peers: impl Iterator<Item = usize>,
        stream: Stream,
    ) -> Result<Operation> {
        let (number, spare) = self.state.lock().next()?;
        let operation = Operation { number, label };
        let mut flight = spare.map_or_else(|| Flight::new(memory), Ok)?;
        flight.prepare(operation, peers);
        self.state.lock().is_beginning = true;
        let recorded = flight.begin.record(stream);
        let mut state = self.state.lock();
        state.is_beginning = false;
        match recorded {
            Ok(true) => state.under_way.push_back(flight),
            Ok(false) => {
                let mark = state.replays.begin(operation, &flight.peers);
                state.spare.push(flight);
                drop(state);
                mark.map_or(Ok(()), |mark| mark.capture(stream))?;
            }
            Err(error) => {
                state.spare.push(flight);
                return Err(error);
            }
        }
        Ok(operation)
    }

    /// `operation` was enqueued on `stream`.
    pub fn enqueued(&self, operation: Operation, stream: Stream) -> Result<()> {
        let Some(mut end) = self.state.lock().take_end(operation) else {
            let mark = self.state.lock().replays.end(operation);
            return mark.map_or(Ok(()), |mark| mark.capture(stream));
        };
        let recorded = end.record(stream);
        if let Some(flight) = self.state.lock().last(operation) {
            flight.end = Some(end);
            flight.is_enqueued = recorded.is_ok();
        }
        recorded.map(drop)
    }

    /// `operation` was not enqueued. Returns with whom it was to be.
    pub fn withdraw(&self, operation: Operation) -> Vec<usize> {
        let mut state = self.state.lock();
        if state.under_way.back().map(|flight| flight.operation) == Some(operation)
            && let Some(flight) = state.under_way.pop_back()
        {
            state.spare.push(flight);
        }
        // A captured one is there, too; the watchdog may have added others since.
        let mut spare = state.spare.iter().rev();
        let withdrawn = spare.find(|flight| flight.operation == operation);
        withdrawn.map_or_else(Vec::new, |flight| distinct(&flight.peers))
    }

    /// The first operation, also of those in graphs, if it has run longer than `limit` at `now`. None while another
    /// thread has them in hand, which may be long: the watchdog has others to look after.
    pub fn late(&self, now: Instant, limit: Duration) -> Result<Option<Late>> {
        let Some(mut state) = self.state.try_lock() else {
            return Ok(None);
        };
        match state.late(now, limit)? {
            None => Ok(state.replays.late(now, limit)),
            late => Ok(late),
        }
    }

    /// The last operation for `label`, for which the host has `waited`, unless it is over.
    pub fn late_on_host(&self, label: Label, waited: Duration) -> Result<Option<Late>> {
        let mut state = self.state.lock();
        state.land()?;
        let first = state.under_way.front().map(|flight| flight.operation);
        let mut under_way = state.under_way.iter().rev();
        let awaited = under_way.find(|flight| flight.operation.label == label);
        Ok(awaited.map(|flight| Late {
            operation: flight.operation,
            peers: distinct(&flight.peers),
            waited,
            is_replayed: false,
            behind: first.filter(|&first| first != flight.operation),
        }))
    }

    /// The operation that runs, also in a replay, or else the one that was the last to.
    pub fn recent(&self) -> Option<Recent> {
        let state = self.state.lock();
        let running = state.under_way.front().map(|flight| flight.recent(true));
        let running = running.or_else(|| state.replays.running());
        running.or_else(|| Some(state.spare.last()?.recent(false)))
    }

    /// Whether all that was enqueued outside of graphs has run.
    pub fn are_over(&self) -> Result<bool> {
        let mut state = self.state.lock();
        state.land()?;
        Ok(state.under_way.is_empty() && !state.is_beginning)
    }

    /// Whether a graph that is not destroyed has any operation.
    pub fn are_in_graphs(&self) -> bool {
        self.state.lock().replays.are_in_graphs()
    }

    /// Whether any operation was ever captured.
    pub fn were_captured(&self) -> bool {
        self.state.lock().replays.were_captured()
    }

    /// Asks [`Flights::are_in_graphs`] when the flights are gone.
    pub fn in_graphs(&self) -> InGraphs {
        self.state.lock().replays.in_graphs()
    }
}

impl State {
    /// The number of the next operation, and what an earlier one has left for it.
    fn next(&mut self) -> Result<(u64, Option<Flight>)> {
        if self.spare.is_empty() && self.under_way.len() >= MANY {
            self.land()?;
        }
        let number = self.operations;
        self.operations += 1;
        Ok((number, self.spare.pop()))
    }

    /// `operation`, if it is the last under way.
    fn last(&mut self, operation: Operation) -> Option<&mut Flight> {
        let last = self.under_way.back_mut();
        last.filter(|flight| flight.operation == operation)
    }

    fn take_end(&mut self, operation: Operation) -> Option<Box<dyn StreamMark>> {
        self.last(operation)?.end.take()
    }

    /// The first operation outside of graphs, if it has run longer than `limit` at `now`.
    fn late(&mut self, now: Instant, limit: Duration) -> Result<Option<Late>> {
        self.land()?;
        let Some(first) = self.under_way.front_mut() else {
            return Ok(None);
        };
        if first.seen.is_none() && !first.begin.is_over()? {
            return Ok(None);
        }
        let seen = *first.seen.get_or_insert(now);
        let waited = now.saturating_duration_since(seen);
        Ok((waited > limit).then(|| Late {
            operation: first.operation,
            peers: distinct(&first.peers),
            waited,
            is_replayed: false,
            behind: None,
        }))
    }

    /// Takes out what is over.
    fn land(&mut self) -> Result<()> {
        // They run in order, so after the last all are over.
        if let Some(last) = self.under_way.back()
            && last.is_over()?
        {
            self.spare.extend(self.under_way.drain(..));
        }
        while let Some(first) = self.under_way.front() {
            if !first.is_over()? {
                break;
            }
            self.spare.extend(self.under_way.pop_front());
        }
        Ok(())
    }
}

impl Flight {
    fn new(memory: &dyn DeviceMemory) -> Result<Self> {
        Ok(Self {
            operation: Operation::WARM_UP,
            peers: Vec::new(),
            begin: memory.new_mark()?,
            end: Some(memory.new_mark()?),
            is_enqueued: false,
            seen: None,
        })
    }

    fn recent(&self, runs: bool) -> Recent {
        Recent {
            operation: self.operation,
            peers: distinct(&self.peers),
            runs,
        }
    }

    fn is_over(&self) -> Result<bool> {
        match &self.end {
            Some(end) if self.is_enqueued => end.is_over(),
            _ => Ok(false),
        }
    }

    fn prepare(&mut self, operation: Operation, peers: impl Iterator<Item = usize>) {
        self.operation = operation;
        self.is_enqueued = false;
        self.seen = None;
        self.peers.clear();
        self.peers.extend(peers);
    }
}

impl Works for Flights {
    fn while_idle(&self, graphs: Graphs, then: &mut dyn FnMut()) {
        let Some(mut state) = self.state.try_lock() else {
            return;
        };
        let may_run = graphs == Graphs::Count && state.replays.are_in_graphs();
        // A device in error runs nothing any more.
        let has_none = state.land().is_err() || state.under_way.is_empty();
        let is_idle = has_none && !state.is_beginning;
        if !may_run && is_idle {
            then();
        }
    }
}

#[cfg(test)]
#[path = "flights_tests.rs"]
pub mod tests;

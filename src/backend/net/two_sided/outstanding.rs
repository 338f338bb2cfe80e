//! Operations that were enqueued and have not ended, and how long the first of them has run.
//!
//! Operations of a transport run one after the other. So time counts for the first alone: since its stream has reached
//! it and the one before it was over.
//!
//! Never hold the lock while recording a mark: recording may block on a full stream, and the watchdog needs the lock to
//! end what that stream waits for.

use crate::backend::device::{Device, StreamMark};
use crate::backend::nccl::own::InGraphs;
use crate::backend::net::two_sided::replays::{NewReplayMarks, Replays};
use crate::backend::net::two_sided::{Label, Late, Operation, Recent, distinct};
use crate::backend::quiescence::{Graphs, Works};
use crate::error::Result;
use crate::model::ids::GroupRank;
use crate::model::ops::Stream;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// From this many operations on, enqueuing calls collect ended ones; below, only the watchdog does.
const MANY: usize = 64;

/// Enqueued operations, in order.
#[derive(Default)]
pub struct Outstanding {
    /// Also held while memory is freed at a quiescent moment.
    state: Mutex<State>,
    /// Captured operations, with a lock that nobody holds for long: their deadline must be checked even during a free
    /// that waits for them.
    replays: Mutex<Replays>,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Pending>,
    /// Ended ones, for reuse.
    reusable: Vec<Pending>,
    operations: u64,
    /// An operation is about to be added.
    is_beginning: bool,
}

struct Pending {
    operation: Operation,
    /// The ranks that it exchanges with, with repetitions.
    peers: Vec<GroupRank>,
    begin: Box<dyn StreamMark>,
    /// Taken out while it is being recorded.
    end: Option<Box<dyn StreamMark>>,
    /// The call that enqueues it has returned, and its end is marked.
    is_enqueued: bool,
    /// When it was first seen running.
    running_since: Option<Instant>,
}

impl Outstanding {
    pub fn new(new_replay_marks: NewReplayMarks<'_>) -> Result<Self> {
        Ok(Self { replays: Mutex::new(Replays::new(new_replay_marks)?), ..Self::default() })
    }

    /// Records that an operation with `peers` is about to be enqueued on `stream`.
    pub fn begin(
        &self,
        device: &dyn Device,
        label: Label,
        peers: impl Iterator<Item = GroupRank>,
        stream: Stream,
    ) -> Result<Operation> {
        let (number, reusable) = self.state.lock().next()?;
        let operation = Operation { number, label };
        let mut pending = reusable.map_or_else(|| Pending::new(device), Ok)?;
        pending.prepare(operation, peers);
        self.state.lock().is_beginning = true;
        let recorded = pending.begin.record(stream);
        let mut state = self.state.lock();
        state.is_beginning = false;
        match recorded {
            Ok(true) => state.pending.push_back(pending),
            Ok(false) => {
                let mark = self.replays.lock().begin(operation, &pending.peers);
                state.reusable.push(pending);
                drop(state);
                mark.map_or(Ok(()), |mark| mark.capture(stream))?;
            }
            Err(error) => {
                state.reusable.push(pending);
                return Err(error);
            }
        }
        Ok(operation)
    }

    /// Records that `operation` was enqueued on `stream`.
    pub fn enqueued(&self, operation: Operation, stream: Stream) -> Result<()> {
        let Some(mut end) = self.state.lock().take_end(operation) else {
            let mark = self.replays.lock().end(operation);
            return mark.map_or(Ok(()), |mark| mark.capture(stream));
        };
        let recorded = end.record(stream);
        if let Some(pending) = self.state.lock().last(operation) {
            pending.end = Some(end);
            pending.is_enqueued = recorded.is_ok();
        }
        recorded.map(drop)
    }

    /// Records that `operation` was not enqueued; returns its peers.
    pub fn withdraw(&self, operation: Operation) -> Vec<GroupRank> {
        let mut state = self.state.lock();
        if state.pending.back().map(|pending| pending.operation) == Some(operation)
            && let Some(pending) = state.pending.pop_back()
        {
            state.reusable.push(pending);
        }
        // Captured ones are there, too; the watchdog may have added others since.
        let mut latest_first = state.reusable.iter().rev();
        let withdrawn = latest_first.find(|known| known.operation == operation);
        withdrawn.map_or_else(Vec::new, |known| distinct(&known.peers))
    }

    /// The first operation, in graphs or not, if it has run longer than `limit` at `now`. Those outside graphs are
    /// skipped while another thread holds their lock, which may be long: the watchdog has others to look after.
    pub fn late(&self, now: Instant, limit: Duration) -> Result<Option<Late>> {
        let late = self.state.try_lock().map_or(Ok(None), |mut state| state.late(now, limit))?;
        Ok(late.or_else(|| self.replays.lock().late(now, limit)))
    }

    /// The last operation for `label`, which the host has `waited` for, unless it is over.
    pub fn late_on_host(&self, label: Label, waited: Duration) -> Result<Option<Late>> {
        let mut state = self.state.lock();
        state.reap()?;
        let first = state.pending.front().map(|pending| pending.operation);
        let mut latest_first = state.pending.iter().rev();
        let awaited = latest_first.find(|pending| pending.operation.label == label);
        Ok(awaited.map(|awaited| {
            let behind = first.filter(|&first| first != awaited.operation);
            Late { behind, ..awaited.late(waited) }
        }))
    }

    /// The operation that runs, maybe in a replay, or else the last one that did. Those outside graphs are unknown
    /// while another thread holds their lock, as in [`Outstanding::late`].
    pub fn recent(&self) -> Option<Recent> {
        let state = self.state.try_lock();
        let running = (state.as_ref()).and_then(|state| Some(state.pending.front()?.recent(true)));
        let running = running.or_else(|| self.replays.lock().running());
        running.or_else(|| Some(state?.reusable.last()?.recent(false)))
    }

    /// Whether everything enqueued outside graphs has ended.
    pub fn are_over(&self) -> Result<bool> {
        let mut state = self.state.lock();
        state.reap()?;
        Ok(state.pending.is_empty() && !state.is_beginning)
    }

    /// Whether a live graph has any operation.
    pub fn are_in_graphs(&self) -> bool {
        self.replays.lock().are_in_graphs()
    }

    /// A function that answers [`Outstanding::are_in_graphs`] even after this is dropped.
    pub fn in_graphs(&self) -> InGraphs {
        self.replays.lock().in_graphs()
    }
}

impl State {
    /// The next operation's number, and an ended operation to reuse.
    fn next(&mut self) -> Result<(u64, Option<Pending>)> {
        if self.reusable.is_empty() && self.pending.len() >= MANY {
            self.reap()?;
        }
        let number = self.operations;
        self.operations += 1;
        Ok((number, self.reusable.pop()))
    }

    /// `operation`, if it is the last one.
    fn last(&mut self, operation: Operation) -> Option<&mut Pending> {
        self.pending.back_mut().filter(|pending| pending.operation == operation)
    }

    fn take_end(&mut self, operation: Operation) -> Option<Box<dyn StreamMark>> {
        self.last(operation)?.end.take()
    }

    /// The first operation outside graphs, if it has run longer than `limit` at `now`.
    fn late(&mut self, now: Instant, limit: Duration) -> Result<Option<Late>> {
        self.reap()?;
        let Some(first) = self.pending.front_mut() else { return Ok(None) };
        if first.running_since.is_none() && !first.begin.is_over()? {
            return Ok(None);
        }
        let waited = now.saturating_duration_since(*first.running_since.get_or_insert(now));
        Ok((waited > limit).then(|| first.late(waited)))
    }

    /// Takes out ended operations.
    fn reap(&mut self) -> Result<()> {
        // They run in order: if the last has ended, all have.
        if let Some(last) = self.pending.back()
            && last.is_over()?
        {
            self.reusable.extend(self.pending.drain(..));
        }
        while let Some(first) = self.pending.front() {
            if !first.is_over()? {
                break;
            }
            self.reusable.extend(self.pending.pop_front());
        }
        Ok(())
    }
}

impl Pending {
    fn new(device: &dyn Device) -> Result<Self> {
        Ok(Self {
            operation: Operation::WARM_UP,
            peers: Vec::new(),
            begin: device.new_mark()?,
            end: Some(device.new_mark()?),
            is_enqueued: false,
            running_since: None,
        })
    }

    fn recent(&self, runs: bool) -> Recent {
        Recent { operation: self.operation, peers: distinct(&self.peers), runs }
    }

    fn late(&self, waited: Duration) -> Late {
        let (operation, peers) = (self.operation, distinct(&self.peers));
        Late { operation, peers, waited, is_replayed: false, is_shared: false, behind: None }
    }

    fn is_over(&self) -> Result<bool> {
        match &self.end {
            Some(end) if self.is_enqueued => end.is_over(),
            _ => Ok(false),
        }
    }

    fn prepare(&mut self, operation: Operation, peers: impl Iterator<Item = GroupRank>) {
        self.operation = operation;
        self.is_enqueued = false;
        self.running_since = None;
        self.peers.clear();
        self.peers.extend(peers);
    }
}

impl Works for Outstanding {
    fn while_idle(&self, graphs: Graphs, then: &mut dyn FnMut()) {
        let Some(mut state) = self.state.try_lock() else { return };
        let may_run = graphs == Graphs::Count && self.are_in_graphs();
        // Nothing runs any more on a device in error.
        let has_none = state.reap().is_err() || state.pending.is_empty();
        let is_idle = has_none && !state.is_beginning;
        if !may_run && is_idle {
            then();
        }
    }
}

#[cfg(test)]
#[path = "outstanding_tests.rs"]
mod tests;

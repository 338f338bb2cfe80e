//! A group: its facts, its backend, whether it is still usable, and which dispatch owns which view.

use crate::backend::device::{Blocks, Device, EnteredDevice, OwnStream};
use crate::backend::{Faults, OpenGroup};
use crate::error::refusal::{Extent, InSequence, OfTensor, Role, Subject};
use crate::error::{Code, Context, Error, Result};
use crate::log;
use crate::model::group::{ByMode, GroupFacts, MAX_TOP_K};
use crate::model::handle_state::block_bytes;
use crate::model::ops::{HandleForm, STAGED_SLOTS, StagedSlot, Stream, ViewBank};
use crate::model::tensor::DevPtr;
use crate::session::about::About;
use crate::session::check::Checks;
use crate::session::choices::{Asked, Choices, Selector};
use crate::tuning::{Learned, Operation};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub struct Group {
    facts: GroupFacts,
    nodes: usize,
    backend: OpenGroup,
    faults: Arc<dyn Faults>,
    /// For exchanges to which the caller gives no stream.
    own_stream: OnceCell<OwnStream>,
    about: Option<About>,
    checks: Option<Checks>,
    pub(super) choices: Choices,
    failed: OnceCell<Error>,
    /// Whether the caller has got a failure.
    told: AtomicBool,
    closed: AtomicBool,
    staged: Mutex<Staged>,
    /// The address of each [`Statistic`]; 0 for none.
    statistics: [AtomicUsize; 3],
    views: Mutex<Views>,
    _with: Option<Arc<dyn Any + Send + Sync>>,
}

/// What operations add to aligned int64 of the caller's on the device.
#[derive(Clone, Copy, Debug)]
pub enum Statistic {
    /// `[L]`: the rows that each local expert receives in dispatches that deliver rows by expert (in LL, with a
    /// counter).
    Rows,
    /// `[R]`: the nanoseconds that LL dispatches wait for each source rank.
    Waits,
    /// The same of combines, LL and HT.
    CombineWaits,
}

/// A group's staged operations, each in a slot that is the same on all ranks. Slots take turns, and a busy one is
/// skipped: ranks may complete two operations in different orders, unless a third is sent in between.
#[derive(Default)]
struct Staged {
    next: usize,
    waiting: [bool; STAGED_SLOTS],
}

impl Group {
    /// A group over an open backend, with a stream for its exchanges if the caller gave none.
    pub(super) fn new(
        facts: GroupFacts,
        nodes: usize,
        backend: OpenGroup,
        own_stream: Option<OwnStream>,
        about: Option<About>,
        checks: Option<Checks>,
        learned: Learned,
    ) -> Self {
        Self {
            facts,
            nodes,
            faults: backend.common.faults(),
            choices: Choices::new(&facts, nodes, backend.common.profile().most_blocks, learned),
            backend,
            own_stream: own_stream.map_or_else(OnceCell::new, OnceCell::with_value),
            about,
            checks,
            failed: OnceCell::new(),
            told: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            staged: Mutex::default(),
            statistics: Default::default(),
            views: Mutex::default(),
            _with: None,
        }
    }

    /// Makes the group keep `with` alive until it and all its handles are gone.
    pub fn keeping(self, with: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _with: Some(with), ..self }
    }

    /// Makes the group's handles take their blocks from `blocks`, if given and if the backend has blocks.
    pub fn with_blocks_from(self, blocks: Option<Arc<impl Blocks + 'static>>) -> Self {
        if let Some(blocks) = blocks {
            self.backend.common.take_blocks_from(blocks);
        }
        self
    }

    /// Refuses a captured `stream` for work that a group does once: a replay would do it too late for the other ranks,
    /// and repeatedly.
    pub fn check_not_captured(&self, stream: Stream) -> Result<()> {
        check_not_captured(self.device().as_ref(), stream)
    }

    /// Makes the group's device current on the calling thread until the result is dropped. Meanwhile no call of the
    /// thread disturbs a capture.
    pub(super) fn enter(&self) -> Result<EnteredDevice> {
        self.device().enter()
    }

    /// Closes the group: calls on its handles are refused from now on. The closing exchange runs on `stream`, by
    /// default where the creation's exchanges ran. Collective. `tell` gets a failure that no call has returned: an
    /// operation may have been the last one.
    pub fn close(&self, stream: Option<Stream>, tell: impl FnOnce(Error)) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        // If the device cannot be entered, closing reports that.
        let _entered = self.enter();
        let own = self.own_stream.get().map(|own| own.stream);
        let closed = self.backend.common.close(stream.or(own).unwrap_or(Stream::DEFAULT));
        if let Some(failure) = self.failure()
            && self.is_news()
        {
            tell(failure.during(Context::GroupFailed));
        }
        closed
    }

    pub fn facts(&self) -> &GroupFacts {
        &self.facts
    }

    /// How many nodes its ranks are on.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Bytes of a caller's memory that a handle with `top_k` ids per token needs; the size depends on nothing else.
    pub fn handle_bytes(&self, top_k: usize, form: HandleForm) -> Result<usize> {
        if top_k > MAX_TOP_K {
            let rule = OfTensor::AtMost(Extent::MostTopK);
            return Err(Error::argument(Subject::Size(Role::Ids, 1), rule).got(top_k, MAX_TOP_K));
        }
        let bytes = match &self.backend.mode {
            ByMode::Ll(_) => block_bytes(&self.facts, top_k, form),
            ByMode::Ht(backend) => backend.block_bytes(top_k, form)?,
        };
        bytes.ok_or_else(|| {
            Error::new(Code::InvalidUsage, "handles in a caller's memory need a bound of tokens per rank")
        })
    }

    /// Prints `version`, the library's, and a description of the group, each if asked for.
    pub fn tell(&self, version: &str) {
        log::version(version);
        if let Some(about) = &self.about {
            log::group(about.device, &format_args!("{version}, {about}"));
        }
    }

    /// The checks to make in each call, if asked for.
    pub(super) fn checks(&self) -> Option<&Checks> {
        self.checks.as_ref()
    }

    /// Sets how this rank runs `operation`; `None` ends that. LL variants must be the same on all ranks, or their
    /// combine fails; everything else is local to a rank. A choice that cannot be followed is skipped, with one
    /// warning.
    pub fn set_choice(&self, operation: Operation, choice: Option<Asked>) {
        self.choices.set(operation, choice);
    }

    /// Lets `selector` choose wherever no choice is set; `None` ends that. It is called within each operation's call,
    /// without a lock, and may not call the library for this group: operations that it enqueues consult nobody.
    pub fn set_selector(&self, selector: Option<Selector>) {
        self.choices.select(selector);
    }

    /// From now on operations add `what` to the memory at `to`; `None` ends that. Local to this rank.
    pub fn collect(&self, what: Statistic, to: Option<DevPtr>) -> Result<()> {
        self.check_usable()?;
        self.statistics[what as usize].store(to.unwrap_or_default().0, Ordering::Release);
        Ok(())
    }

    /// Where operations add `what`.
    pub(super) fn place_of(&self, what: Statistic) -> Option<DevPtr> {
        let place = DevPtr(self.statistics[what as usize].load(Ordering::Acquire));
        (!place.is_null()).then_some(place)
    }

    pub fn device(&self) -> Arc<dyn Device> {
        self.backend.common.device()
    }

    pub(super) fn backend(&self) -> &OpenGroup {
        &self.backend
    }

    /// The failure that made the group unusable, if any.
    pub fn failure(&self) -> Option<Error> {
        self.failed.get().cloned().or_else(|| self.faults.first())
    }

    /// Whether the caller gets a failure for the first time.
    pub fn is_news(&self) -> bool {
        !self.told.swap(true, Ordering::Relaxed)
    }

    /// A call has returned an error: that of the group, if it has failed.
    pub fn has_told(&self) {
        if self.failure().is_some() {
            self.told.store(true, Ordering::Relaxed);
        }
    }

    /// Marks the group unusable by what a call returns; later calls fail at once instead of leaving the peers waiting.
    pub fn mark_failed(&self, error: Error) {
        // The first failure is the one worth reporting.
        let _ = self.failed.set(error);
        self.told.store(true, Ordering::Relaxed);
    }

    /// The library's own stream for the group's exchanges, created on first use.
    pub(super) fn own_stream(&self) -> Result<Stream> {
        self.own_stream.get_or_try_init(|| OwnStream::new(self.device())).map(|own| own.stream)
    }

    /// Refuses work on a closed or failed group.
    pub fn check_usable(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::usage(Subject::Handle, InSequence::GroupDestroyed));
        }
        match self.failure() {
            Some(failure) => Err(failure.during(Context::GroupFailed)),
            None => Ok(()),
        }
    }

    /// Sends a staged operation with `send`, which gets its slot; refuses if no slot is free.
    pub(super) fn send_staged(&self, send: impl FnOnce(StagedSlot) -> Result<()>) -> Result<StagedSlot> {
        let mut staged = self.staged.lock();
        let Some(slot) = staged.free_slot() else {
            return Err(Error::usage(Subject::Staging, InSequence::FewerStaged)
                .got(STAGED_SLOTS + 1, format_args!("at most {STAGED_SLOTS}")));
        };
        send(slot)?;
        staged.next = slot.index() + 1;
        staged.set_waiting(slot, true);
        Ok(slot)
    }

    /// Fills the next view with `dispatch` on `stream`; `dispatch` gets the bank.
    pub(super) fn fill_view<T>(
        &self,
        stream: Stream,
        dispatch: impl FnOnce(ViewBank) -> Result<T>,
    ) -> Result<(View, T)> {
        let is_captured = self.device().is_captured(stream)?;
        let mut views = self.views.lock();
        let filled = dispatch(views.next())?;
        Ok((views.fill(is_captured), filled))
    }

    /// Whether another dispatch has taken the view's bank.
    pub(super) fn has_view_ended(&self, view: View) -> bool {
        self.views.lock().has_ended(view)
    }

    /// Frees `slot`: its staged operation was completed or abandoned.
    pub(super) fn end_staged(&self, slot: StagedSlot) {
        self.staged.lock().set_waiting(slot, false);
    }
}

/// As [`Group::check_not_captured`], before there is a group on `device`.
pub(super) fn check_not_captured(device: &dyn Device, stream: Stream) -> Result<()> {
    match device.is_captured(stream) {
        Ok(true) => Err(Error::usage(Subject::Stream, InSequence::NoCaptureOfGroup)),
        // Anything else wrong with the stream shows when it is used.
        _ => Ok(()),
    }
}

impl Staged {
    fn free_slot(&self) -> Option<StagedSlot> {
        let turns = StagedSlot::ALL.into_iter().cycle().skip(self.next % STAGED_SLOTS);
        turns.take(STAGED_SLOTS).find(|slot| self.waiting.get(slot.index()) == Some(&false))
    }

    fn set_waiting(&mut self, slot: StagedSlot, waits: bool) {
        if let Some(waiting) = self.waiting.get_mut(slot.index()) {
            *waiting = waits;
        }
    }
}

/// The views that a group has filled. Calls and captures take turns together, so the views of graphs that are captured
/// one after the other may overlap.
#[derive(Default)]
struct Views {
    next: ViewBank,
    /// By bank, how often calls and captures have filled it. Apart: a capture fills nothing before a replay.
    filled: [Filled; ViewBank::COUNT],
}

#[derive(Default)]
struct Filled {
    by_calls: usize,
    in_captures: usize,
}

/// A view that was filled.
#[derive(Clone, Copy)]
pub(super) struct View {
    bank: ViewBank,
    is_captured: bool,
    /// Which fill of its bank by calls, or by captures, this was.
    number: usize,
}

impl Views {
    /// The bank of the next view.
    fn next(&self) -> ViewBank {
        self.next
    }

    /// Records that the next bank was filled.
    fn fill(&mut self, is_captured: bool) -> View {
        let bank = self.next;
        self.next = bank.next();
        let count = self.count(bank, is_captured);
        *count += 1;
        View { bank, is_captured, number: *count }
    }

    /// Whether its bank was filled again since, in the same way.
    fn has_ended(&mut self, view: View) -> bool {
        *self.count(view.bank, view.is_captured) != view.number
    }

    fn count(&mut self, bank: ViewBank, is_captured: bool) -> &mut usize {
        let filled = &mut self.filled[bank.index()];
        if is_captured { &mut filled.in_captures } else { &mut filled.by_calls }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_ends_when_its_bank_is_filled_again() {
        let mut views = Views::default();
        let first = views.fill(false);
        let second = views.fill(false);
        assert!(!views.has_ended(first) && !views.has_ended(second));
        views.fill(false);
        assert!(views.has_ended(first) && !views.has_ended(second));
    }

    #[test]
    fn what_is_captured_ends_no_view_of_a_call() {
        let mut views = Views::default();
        let called = views.fill(false);
        let captured = views.fill(true);
        for _ in 0..4 {
            views.fill(true);
        }
        assert!(!views.has_ended(called) && views.has_ended(captured));
        assert_eq!(views.next(), called.bank.next().next());
    }
}

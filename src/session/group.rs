//! An open group: its facts, its backend, whether it is still usable, and which dispatch owns which view.

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
use crate::session::choices::{ChoiceRequest, Choices, Selector};
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
    /// The stream of exchanges to which the caller gives none.
    own_stream: OnceCell<OwnStream>,
    about: Option<About>,
    checks: Option<Checks>,
    pub(super) choices: Choices,
    failed: OnceCell<Error>,
    /// Whether a call has returned a failure.
    reported: AtomicBool,
    closed: AtomicBool,
    staged: Mutex<Staged>,
    /// The address of each [`Statistic`]; 0 if it is not collected.
    statistics: [AtomicUsize; 3],
    views: Mutex<Views>,
    _with: Option<Arc<dyn Any + Send + Sync>>,
}

/// What operations can add to a caller's int64 array on the device.
#[derive(Clone, Copy, Debug)]
pub enum Statistic {
    /// `[L]`: the rows that each local expert receives in dispatches that deliver rows by expert; in LL, only those
    /// with a counter.
    Rows,
    /// `[R]`: the nanoseconds that LL dispatches wait for each source rank.
    Waits,
    /// `[R]`: the nanoseconds that combines, LL and HT, wait for each source rank.
    CombineWaits,
}

/// A group's staged operations, each in a slot that is the same on all ranks. Slots are used in turn, but busy ones are
/// skipped; so ranks may complete two operations in different orders, unless a third is sent in between.
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
            reported: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            staged: Mutex::default(),
            statistics: Default::default(),
            views: Mutex::default(),
            _with: None,
        }
    }

    /// Keeps `with` alive until the group and all its handles are gone.
    pub fn keeping(self, with: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _with: Some(with), ..self }
    }

    /// Makes handles take their blocks from `blocks`, if it is not `None` and the backend has blocks.
    pub fn with_blocks_from(self, blocks: Option<Arc<impl Blocks + 'static>>) -> Self {
        if let Some(blocks) = blocks {
            self.backend.common.take_blocks_from(blocks);
        }
        self
    }

    /// Refuses a captured `stream` for work that must be done once: replays would do it too late for other ranks, and
    /// repeatedly.
    pub fn check_not_captured(&self, stream: Stream) -> Result<()> {
        check_not_captured(self.device().as_ref(), stream)
    }

    /// Makes the group's device current on the calling thread until the result is dropped; until then calls of the
    /// thread do not disturb captures.
    pub(super) fn enter(&self) -> Result<EnteredDevice> {
        self.device().enter()
    }

    /// Closes the group, after which calls on its handles are refused. The closing exchange runs on `stream`, by
    /// default on the stream of the creation's exchanges. Collective. `report` gets a failure that no call has
    /// returned, as of the last operation.
    pub fn close(&self, stream: Option<Stream>, report: impl FnOnce(Error)) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        // The error is ignored, as closing reports it, too.
        let _entered = self.enter();
        let own = self.own_stream.get().map(|own| own.stream);
        let closed = self.backend.common.close(stream.or(own).unwrap_or(Stream::DEFAULT));
        if let Some(failure) = self.failure()
            && self.is_news()
        {
            report(failure.during(Context::GroupFailed));
        }
        closed
    }

    pub fn facts(&self) -> &GroupFacts {
        &self.facts
    }

    /// The number of nodes that the group's ranks are on.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Bytes of a caller's memory for a handle with this form and `top_k` ids per token, whatever its routing.
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

    /// Logs the library's `version` and a description of the group, each if the environment asks for it.
    pub fn log_opening(&self, version: &str) {
        log::version(version);
        if let Some(about) = &self.about {
            log::group(about.device, &format_args!("{version}, {about}"));
        }
    }

    /// The checks to make in each call, if the environment asks for them.
    pub(super) fn checks(&self) -> Option<&Checks> {
        self.checks.as_ref()
    }

    /// To be called after an operation, or a phase of one, was enqueued on `stream`.
    pub(super) fn enqueued(&self, stream: Stream) {
        if let Some(checks) = &self.checks {
            checks.follow(stream);
        }
    }

    /// Sets how this rank runs `operation`; `None` removes the choice. If LL variants differ between ranks, combines
    /// fail; everything else may differ. A choice that cannot be followed is skipped, with one warning.
    pub fn set_choice(&self, operation: Operation, choice: Option<ChoiceRequest>) {
        self.choices.set(operation, choice);
    }

    /// Lets `selector` choose for operations without a set choice; `None` removes it. Each operation's call runs it,
    /// without locks. It may not call the library for this group; operations that it enqueues consult no selector.
    pub fn set_selector(&self, selector: Option<Selector>) {
        self.choices.select(selector);
    }

    /// Makes operations add `what` to the array at `to`, until a call with `None`. Local to this rank.
    pub fn collect(&self, what: Statistic, to: Option<DevPtr>) -> Result<()> {
        self.check_usable()?;
        self.statistics[what as usize].store(to.unwrap_or_default().0, Ordering::Release);
        Ok(())
    }

    /// The array to which operations add `what`.
    pub(super) fn address_of(&self, what: Statistic) -> Option<DevPtr> {
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

    /// Whether no call has returned a failure before; later calls get false.
    pub fn is_news(&self) -> bool {
        !self.reported.swap(true, Ordering::Relaxed)
    }

    /// Records that a call has returned `error`, which may be the group's failure.
    pub fn mark_reported(&self, error: &Error) {
        if self.failure().is_some_and(|failure| failure.report().cause == error.report().cause) {
            self.reported.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the group unusable because of `error`, so that later calls fail at once instead of making peers wait.
    pub fn mark_failed(&self, error: Error) {
        // Only the first failure is reported.
        let _ = self.failed.set(error);
        self.reported.store(true, Ordering::Relaxed);
    }

    /// The group's own stream for exchanges, created on first use.
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

    /// Sends a staged operation by `send`, which gets its slot; an error if no slot is free.
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

    /// Fills the next view by `dispatch`, which gets the bank, on `stream`.
    pub(super) fn fill_view(
        &self,
        stream: Stream,
        dispatch: impl FnOnce(ViewBank) -> Result<DevPtr>,
    ) -> Result<(View, DevPtr)> {
        let is_captured = self.device().is_captured(stream)?;
        let mut views = self.views.lock();
        let at = dispatch(views.next())?;
        Ok((views.fill(is_captured, at), at))
    }

    /// Where dispatches have left rows in views.
    pub(super) fn views_at(&self) -> Vec<DevPtr> {
        self.views.lock().addresses.clone()
    }

    /// Whether a later dispatch has taken the view's bank.
    pub(super) fn has_view_ended(&self, view: View) -> bool {
        self.views.lock().has_ended(view)
    }

    /// Frees `slot`, whose staged operation was completed or abandoned.
    pub(super) fn end_staged(&self, slot: StagedSlot) {
        self.staged.lock().set_waiting(slot, false);
    }
}

/// As [`Group::check_not_captured`], if there is no group on `device` yet.
pub(super) fn check_not_captured(device: &dyn Device, stream: Stream) -> Result<()> {
    match device.is_captured(stream) {
        Ok(true) => Err(Error::usage(Subject::Stream, InSequence::NoCaptureOfGroup)),
        // Other errors of the stream are reported when it is used.
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
    /// How often calls, and separately captures, which fill nothing until a replay, have filled each bank.
    filled: [Filled; ViewBank::COUNT],
    /// Where views were; a bank may have one in place and one of copies.
    addresses: Vec<DevPtr>,
}

#[derive(Default)]
struct Filled {
    by_calls: usize,
    in_captures: usize,
}

/// A filled view.
#[derive(Clone, Copy)]
pub(super) struct View {
    bank: ViewBank,
    is_captured: bool,
    /// The number of this fill among those of its bank by calls, or by captures.
    number: usize,
}

impl Views {
    /// The bank that the next view takes.
    fn next(&self) -> ViewBank {
        self.next
    }

    /// Records that the next bank was filled with a view at `at`.
    fn fill(&mut self, is_captured: bool, at: DevPtr) -> View {
        if !self.has_at(at) {
            self.addresses.push(at);
        }
        let bank = self.next;
        self.next = bank.next();
        let count = self.count(bank, is_captured);
        *count += 1;
        View { bank, is_captured, number: *count }
    }

    /// Whether the view's bank was filled again, likewise by a call or a capture.
    fn has_ended(&mut self, view: View) -> bool {
        *self.count(view.bank, view.is_captured) != view.number
    }

    fn has_at(&self, data: DevPtr) -> bool {
        self.addresses.contains(&data)
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
        let first = views.fill(false, DevPtr(16));
        let second = views.fill(false, DevPtr(16));
        assert!(!views.has_ended(first) && !views.has_ended(second));
        views.fill(false, DevPtr(16));
        assert!(views.has_ended(first) && !views.has_ended(second));
    }

    #[test]
    fn what_is_captured_ends_no_view_of_a_call() {
        let mut views = Views::default();
        let called = views.fill(false, DevPtr(16));
        let captured = views.fill(true, DevPtr(16));
        for _ in 0..4 {
            views.fill(true, DevPtr(16));
        }
        assert!(!views.has_ended(called) && views.has_ended(captured));
        assert_eq!(views.next(), called.bank.next().next());
    }
}

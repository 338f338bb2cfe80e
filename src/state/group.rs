//! A group: its facts, its backend, its allocator, and whether it still works.
#![forbid(unsafe_code)]

use crate::backend::OpenGroup;
use crate::error::{Code, Error, Result};
use crate::model::group::GroupFacts;
use crate::model::ops::{STAGED_SLOTS, StagedSlot, Stream};
use crate::state::registry::{Missing, Registry};
use crate::state::tensors::{Freeing, TensorAllocator};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

static GROUPS: Registry<Group> = Registry::new(1);

/// Tensors of a dead group are still freed as they should be.
static FREEING: Mutex<Freeing> = Mutex::new(Freeing::EMPTY);

/// An open group.
pub struct Group {
    facts: GroupFacts,
    backend: OpenGroup,
    allocator: Arc<dyn TensorAllocator>,
    failed: OnceCell<Error>,
    reported: AtomicBool,
    closed: AtomicBool,
    staged: Mutex<Staged>,
}

/// The staged operations of a group, each in a slot that must be the same on all ranks. They take turns,
/// past a slot that is not free: so it does not matter in which order ranks complete two, unless a third
/// is sent in between.
#[derive(Default)]
struct Staged {
    next: usize,
    waiting: [bool; STAGED_SLOTS],
}

impl Group {
    /// A group over an open backend.
    pub fn new(facts: GroupFacts, backend: OpenGroup, allocator: Arc<dyn TensorAllocator>) -> Self {
        Self {
            facts,
            backend,
            allocator,
            failed: OnceCell::new(),
            reported: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            staged: Mutex::default(),
        }
    }

    /// Makes the group known under a number.
    pub fn register(self) -> usize {
        let allocator = Arc::clone(&self.allocator);
        let mut freeing = FREEING.lock();
        let number = GROUPS.insert(Arc::new(self));
        freeing.note(number, &allocator);
        number
    }

    /// The group numbered `number`.
    pub fn resolve(number: usize) -> Result<Arc<Group>> {
        GROUPS
            .resolve(number)
            .map_err(|missing| refusal("ep_group", "group", missing))
    }

    /// Takes the group numbered `number` out of use and closes it.
    pub fn destroy(number: usize, stream: Stream) -> Result<()> {
        let group = GROUPS
            .remove(number)
            .map_err(|missing| refusal("ep_group", "group", missing))?;
        group.closed.store(true, Ordering::Release);
        group.backend.common().close(stream)
    }

    /// The allocator of the live or destroyed group `number`.
    pub fn allocator_of(number: usize) -> Option<Arc<dyn TensorAllocator>> {
        match GROUPS.resolve(number) {
            Ok(group) => Some(Arc::clone(&group.allocator)),
            Err(Missing::Destroyed) => FREEING.lock().find(number),
            Err(_) => None,
        }
    }

    /// What all ranks know about the group.
    pub fn facts(&self) -> &GroupFacts {
        &self.facts
    }

    /// The backend that the group runs on.
    pub fn backend(&self) -> &OpenGroup {
        &self.backend
    }

    /// Who allocates tensors of this group.
    pub fn allocator(&self) -> &Arc<dyn TensorAllocator> {
        &self.allocator
    }

    /// The failure that has made the group unusable, if any.
    pub fn failure(&self) -> Option<Error> {
        self.failed
            .get()
            .cloned()
            .or_else(|| self.backend.common().fault())
    }

    /// Whether nobody has asked this before: a failure is printed once.
    pub fn is_news(&self) -> bool {
        !self.reported.swap(true, Ordering::Relaxed)
    }

    /// Marks the group unusable; later calls fail at once instead of leaving the peers waiting.
    pub fn mark_failed(&self, error: Error) {
        // The first failure is the one worth reporting.
        let _ = self.failed.set(error);
    }

    /// Refuses work on a closed or failed group.
    pub fn check_usable(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::usage("handle", "its group was destroyed"));
        }
        match self.failure() {
            Some(failure) => Err(Error::new(
                failure.code(),
                format!("the group has failed: {failure}"),
            )),
            None => Ok(()),
        }
    }

    /// Sends a staged operation by `send`, which is told its slot, or refuses.
    pub fn send_staged(&self, send: impl FnOnce(StagedSlot) -> Result<()>) -> Result<StagedSlot> {
        let mut staged = self.staged.lock();
        let Some(slot) = staged.free_slot() else {
            return Err(Error::new(
                Code::InvalidUsage,
                "send_only: too many staged operations of the group wait for ncclEpComplete",
            )
            .got(STAGED_SLOTS + 1, format_args!("at most {STAGED_SLOTS}")));
        };
        send(slot)?;
        staged.next = slot.index() + 1;
        staged.set_waiting(slot, true);
        Ok(slot)
    }

    /// The staged operation in `slot` was completed or given up.
    pub fn end_staged(&self, slot: StagedSlot) {
        self.staged.lock().set_waiting(slot, false);
    }
}

impl Staged {
    fn free_slot(&self) -> Option<StagedSlot> {
        let turns = StagedSlot::ALL
            .into_iter()
            .cycle()
            .skip(self.next % STAGED_SLOTS);
        turns
            .take(STAGED_SLOTS)
            .find(|slot| self.waiting.get(slot.index()) == Some(&false))
    }

    fn set_waiting(&mut self, slot: StagedSlot, waits: bool) {
        if let Some(waiting) = self.waiting.get_mut(slot.index()) {
            *waiting = waits;
        }
    }
}

/// The refusal for `argument`, a number that names no live `kind` of object.
pub fn refusal(argument: &str, kind: &str, missing: Missing) -> Error {
    match missing {
        Missing::Null => Error::argument(argument, "must not be NULL"),
        Missing::Destroyed => Error::argument(argument, "was destroyed already"),
        Missing::Foreign => {
            Error::argument(argument, format_args!("is not a {kind} of this library"))
        }
    }
}

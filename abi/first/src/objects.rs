//! The objects behind the numbers that C holds, and those numbers.

use crate::owners::{Freeing, TensorAllocator};
use crate::refuse;
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::session;
use nccl_ep_core::session::handle::Handle;
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

static GROUPS: Registry<Group> = Registry::new(1);
static HANDLES: Registry<Handle> = Registry::new(2);

/// Allocators of destroyed groups, which still free those groups' tensors.
static FREEING: Mutex<Freeing> = Mutex::new(Freeing::EMPTY);

/// A group of this ABI.
pub struct Group {
    /// The core's group.
    pub session: Arc<session::group::Group>,
    /// Allocates tensors of this group.
    pub allocator: Arc<dyn TensorAllocator>,
    reported: AtomicBool,
}

impl Group {
    /// Registers a group and returns its number.
    pub fn register(session: session::group::Group, allocator: Arc<dyn TensorAllocator>) -> usize {
        let group = Self {
            session: Arc::new(session),
            allocator: Arc::clone(&allocator),
            reported: AtomicBool::new(false),
        };
        let mut freeing = FREEING.lock();
        let number = GROUPS.insert(Arc::new(group));
        freeing.note(number, &allocator);
        number
    }

    /// The group numbered `number`.
    pub fn resolve(number: usize) -> Result<Arc<Self>> {
        GROUPS.resolve(number).map_err(no_group)
    }

    /// Removes the group numbered `number`; later calls do not find it.
    pub fn take(number: usize) -> Result<Arc<Self>> {
        GROUPS.remove(number).map_err(no_group)
    }

    /// The allocator of the live or destroyed group `number`.
    pub fn allocator_of(number: usize) -> Option<Arc<dyn TensorAllocator>> {
        match GROUPS.resolve(number) {
            Ok(group) => Some(Arc::clone(&group.allocator)),
            Err(Missing::Destroyed) => FREEING.lock().find(number),
            Err(_) => None,
        }
    }

    /// True on the first call only: a failure is printed once.
    pub fn is_news(&self) -> bool {
        !self.reported.swap(true, Ordering::Relaxed)
    }
}

/// Registers a handle and returns its number.
pub fn register_handle(handle: Handle) -> usize {
    HANDLES.insert(Arc::new(handle))
}

/// The handle numbered `number`.
pub fn handle(number: usize) -> Result<Arc<Handle>> {
    HANDLES.resolve(number).map_err(no_handle)
}

/// Removes the handle numbered `number`; later calls do not find it.
pub fn take_handle(number: usize) -> Result<Arc<Handle>> {
    HANDLES.remove(number).map_err(no_handle)
}

#[cold]
fn no_group(missing: Missing) -> Error {
    refusal("ep_group", "group", missing)
}

#[cold]
fn no_handle(missing: Missing) -> Error {
    refusal("handle", "handle", missing)
}

/// The refusal of `argument`, a number without a live object of this `kind`.
fn refusal(argument: &str, kind: &str, missing: Missing) -> Error {
    match missing {
        Missing::Null => refuse::argument(argument, "must not be NULL"),
        Missing::Destroyed => refuse::argument(argument, "was destroyed already"),
        Missing::Foreign => {
            refuse::argument(argument, format_args!("is not a {kind} of this library"))
        }
    }
}

/// Live objects of one kind, by number.
///
/// Numbers grow and are never reused, so `resolve` tells "destroyed" from "never existed".
struct Registry<T> {
    live: RwLock<Option<HashMap<usize, Arc<T>>>>,
    issued: AtomicUsize,
    kind: usize,
}

/// Why a number does not name a live object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missing {
    /// NULL.
    Null,
    /// It was destroyed.
    Destroyed,
    /// It never named an object of this kind.
    Foreign,
}

/// Numbers of different kinds differ in their low bits.
const KINDS: usize = 16;

impl<T> Registry<T> {
    /// An empty registry; `kind` is 1 to 15 and differs between registries.
    const fn new(kind: usize) -> Self {
        Self {
            live: RwLock::new(None),
            issued: AtomicUsize::new(0),
            kind,
        }
    }

    /// Registers `object` and returns its number, never 0.
    fn insert(&self, object: Arc<T>) -> usize {
        let count = self.issued.fetch_add(1, Ordering::Relaxed) + 1;
        let number = count * KINDS + self.kind;
        self.live
            .write()
            .get_or_insert_with(HashMap::new)
            .insert(number, object);
        number
    }

    /// The live object numbered `number`.
    fn resolve(&self, number: usize) -> std::result::Result<Arc<T>, Missing> {
        let live = self.live.read();
        match live.as_ref().and_then(|live| live.get(&number)) {
            Some(object) => Ok(Arc::clone(object)),
            None => Err(self.missing(number)),
        }
    }

    /// Removes the object numbered `number`; from now on it counts as destroyed.
    fn remove(&self, number: usize) -> std::result::Result<Arc<T>, Missing> {
        let taken = self
            .live
            .write()
            .as_mut()
            .and_then(|live| live.remove(&number));
        taken.ok_or_else(|| self.missing(number))
    }

    fn missing(&self, number: usize) -> Missing {
        let issued = self.issued.load(Ordering::Relaxed);
        if number == 0 {
            Missing::Null
        } else if number % KINDS == self.kind && (1..=issued).contains(&(number / KINDS)) {
            Missing::Destroyed
        } else {
            Missing::Foreign
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_and_foreign_numbers_are_told_apart() {
        let registry = Registry::new(3);
        let number = registry.insert(Arc::new("first"));
        assert_eq!(registry.resolve(number).as_deref(), Ok(&"first"));
        assert!(registry.remove(number).is_ok());
        assert_eq!(registry.resolve(number), Err(Missing::Destroyed));
        assert_eq!(registry.resolve(number + 1), Err(Missing::Foreign));
        assert_eq!(registry.resolve(0), Err(Missing::Null));
        assert_ne!(registry.insert(Arc::new("second")), number);
    }
}

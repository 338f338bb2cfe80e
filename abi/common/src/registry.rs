//! Objects behind the numbers that C holds.

use crate::refuse;
use nccl_ep_core::error::{Error, Result};
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Live objects of one kind, by number.
///
/// Numbers grow and are never reused, so `resolve` tells "destroyed" from "never existed".
pub struct Registry<T> {
    live: RwLock<Option<HashMap<usize, Arc<T>>>>,
    issued: AtomicUsize,
    kind: usize,
    names: Names,
}

/// What refusals call a number without a live object.
#[derive(Clone, Copy)]
pub struct Names {
    /// The argument that it was passed as.
    pub argument: &'static str,
    /// What it should be.
    pub object: &'static str,
}

/// Why a number does not name a live object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
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
    pub const fn new(kind: usize, names: Names) -> Self {
        Self { names, live: RwLock::new(None), issued: AtomicUsize::new(0), kind }
    }

    /// Registers `object` and returns its number, never 0.
    pub fn insert(&self, object: Arc<T>) -> usize {
        let count = self.issued.fetch_add(1, Ordering::Relaxed) + 1;
        let number = count * KINDS + self.kind;
        self.live.write().get_or_insert_with(HashMap::new).insert(number, object);
        number
    }

    /// The live object numbered `number`.
    pub fn resolve(&self, number: usize) -> Result<Arc<T>> {
        self.find(number).map_err(|missing| self.refusal(missing))
    }

    /// The same, or why there is none.
    pub fn find(&self, number: usize) -> std::result::Result<Arc<T>, Missing> {
        let live = self.live.read();
        match live.as_ref().and_then(|live| live.get(&number)) {
            Some(object) => Ok(Arc::clone(object)),
            None => Err(self.missing(number)),
        }
    }

    /// Removes the object numbered `number`; from now on it counts as destroyed.
    pub fn remove(&self, number: usize) -> Result<Arc<T>> {
        let taken = self.live.write().as_mut().and_then(|live| live.remove(&number));
        taken.ok_or_else(|| self.refusal(self.missing(number)))
    }

    #[cold]
    fn refusal(&self, missing: Missing) -> Error {
        let Names { argument, object } = self.names;
        match missing {
            Missing::Null => refuse::argument(argument, "must not be NULL"),
            Missing::Destroyed => refuse::argument(argument, "was destroyed already"),
            Missing::Foreign => refuse::argument(argument, format_args!("is not a {object} of this library")),
        }
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
        let registry = Registry::new(3, Names { argument: "it", object: "word" });
        let number = registry.insert(Arc::new("first"));
        assert_eq!(registry.find(number).as_deref(), Ok(&"first"));
        assert!(registry.remove(number).is_ok());
        assert_eq!(registry.find(number), Err(Missing::Destroyed));
        assert_eq!(registry.find(number + 1), Err(Missing::Foreign));
        assert_eq!(registry.find(0), Err(Missing::Null));
        assert_ne!(registry.insert(Arc::new("second")), number);
    }
}

//! Objects behind the numbers that C holds.

use crate::refuse;
use nccl_ep_core::error::{Error, Result};
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Live objects of one kind, by number.
///
/// Numbers grow and are never reused, so `resolve` distinguishes "destroyed" from "never existed".
pub struct Registry<T> {
    // Sorted, as numbers grow: searching a few is faster than hashing.
    live: RwLock<Vec<(usize, Arc<T>)>>,
    issued: AtomicUsize,
    kind: usize,
    names: Names,
}

/// How refusals name a number without a live object.
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

/// The low bits of a number give its kind.
const KINDS: usize = 16;

impl<T> Registry<T> {
    /// An empty registry; `kind` is 1 to 15 and differs between registries.
    pub const fn new(kind: usize, names: Names) -> Self {
        Self { names, live: RwLock::new(Vec::new()), issued: AtomicUsize::new(0), kind }
    }

    /// Registers `object` and returns its number, never 0.
    pub fn insert(&self, object: Arc<T>) -> usize {
        let mut live = self.live.write();
        let number = (self.issued.fetch_add(1, Ordering::Relaxed) + 1) * KINDS + self.kind;
        live.push((number, object));
        number
    }

    /// The live object numbered `number`.
    pub fn resolve(&self, number: usize) -> Result<Arc<T>> {
        self.find(number).map_err(|missing| self.refusal(missing))
    }

    /// The same; the error says why there is none.
    pub fn find(&self, number: usize) -> std::result::Result<Arc<T>, Missing> {
        let live = self.live.read();
        match place(&live, number).and_then(|place| live.get(place)) {
            Some((_, object)) => Ok(Arc::clone(object)),
            None => Err(self.missing(number)),
        }
    }

    /// Removes the object numbered `number`; from now on it counts as destroyed.
    pub fn remove(&self, number: usize) -> Result<Arc<T>> {
        let mut live = self.live.write();
        let place = place(&live, number).ok_or_else(|| self.refusal(self.missing(number)))?;
        Ok(live.remove(place).1)
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

/// The position of the object numbered `number`.
fn place<T>(live: &[(usize, T)], number: usize) -> Option<usize> {
    live.binary_search_by_key(&number, |&(number, _)| number).ok()
}

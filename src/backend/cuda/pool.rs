//! Device memory of handles, kept from one handle to the next: allocating and freeing wait for the device.
#![forbid(unsafe_code)]

use crate::error::Result;
use parking_lot::Mutex;
use std::sync::Arc;

/// The pieces of memory that a group's handles have or have had.
pub(super) struct Pool<P> {
    pieces: Mutex<Vec<Arc<P>>>,
}

impl<P> Default for Pool<P> {
    fn default() -> Self {
        Self {
            pieces: Mutex::default(),
        }
    }
}

impl<P> Pool<P> {
    /// The piece with the least `waste` of those that nobody has, else what `make` makes. `waste` is
    /// `None` for a piece that will not do. A piece is free again when the result and its clones are gone,
    /// though what its handle enqueued may still be to come: the group's operations run one after the
    /// other.
    pub(super) fn take(
        &self,
        waste: impl Fn(&P) -> Option<usize>,
        make: impl FnOnce() -> Result<P>,
    ) -> Result<Arc<P>> {
        let mut pieces = self.pieces.lock();
        // Nobody takes one from the vector meanwhile, and what only the vector has is in use nowhere.
        let fitting = pieces
            .iter_mut()
            .filter_map(|it| Some((waste(Arc::get_mut(it)?)?, Arc::clone(it))));
        if let Some((_, piece)) = fitting.min_by_key(|(waste, _)| *waste) {
            return Ok(piece);
        }
        let piece = Arc::new(make()?);
        pieces.push(Arc::clone(&piece));
        Ok(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_least(size: usize) -> impl Fn(&usize) -> Option<usize> {
        move |piece| piece.checked_sub(size)
    }

    fn none_free() -> Result<usize> {
        Err(crate::error::Error::internal("none is free"))
    }

    #[test]
    fn the_smallest_free_piece_that_will_do_is_taken() {
        let pool = Pool::default();
        let pieces = [30, 10, 20].map(|size| pool.take(|_| None, || Ok(size)).unwrap());
        assert!(pool.take(at_least(5), none_free).is_err());
        drop(pieces);
        assert_eq!(*pool.take(at_least(15), none_free).unwrap(), 20);
        assert!(pool.take(at_least(31), none_free).is_err());
    }

    #[test]
    fn a_piece_is_free_when_the_last_that_has_it_is_gone() {
        let pool = Pool::default();
        let first = pool.take(at_least(0), || Ok(7)).unwrap();
        let clone = Arc::clone(&first);
        drop(first);
        assert!(pool.take(at_least(0), none_free).is_err());
        drop(clone);
        assert_eq!(*pool.take(at_least(0), none_free).unwrap(), 7);
    }
}

//! Pieces of some bytes: which are taken, which are free.

use std::collections::BTreeMap;

/// What pieces are multiples of, as torch's allocator has it.
const ALIGN: usize = 512;

/// Free and taken pieces by where they begin; no two free ones are neighbours.
pub struct Cuts {
    free: BTreeMap<usize, usize>,
    taken: BTreeMap<usize, usize>,
}

impl Cuts {
    /// `bytes`, all free.
    pub fn new(bytes: usize) -> Self {
        Self { free: BTreeMap::from([(0, bytes)]), taken: BTreeMap::new() }
    }

    /// Where `bytes` begin that are the caller's from now on: in the smallest piece that has them.
    pub fn take(&mut self, bytes: usize) -> Option<usize> {
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGN)?;
        let fitting = self.free.iter().filter(|&(_, &size)| size >= bytes);
        let (&begin, &size) = fitting.min_by_key(|&(_, &size)| size)?;
        self.free.remove(&begin);
        if size > bytes {
            self.free.insert(begin + bytes, size - bytes);
        }
        self.taken.insert(begin, bytes);
        Some(begin)
    }

    /// Takes back the piece that begins at `begin`; any other place has none.
    pub fn give(&mut self, begin: usize) {
        let Some(mut bytes) = self.taken.remove(&begin) else { return };
        let mut first = begin;
        if let Some(behind) = self.free.remove(&(begin + bytes)) {
            bytes += behind;
        }
        let before = self.free.range(..begin).next_back();
        if let Some((&at, &size)) = before
            && at + size == begin
        {
            first = at;
            bytes += size;
        }
        self.free.insert(first, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_apart_and_come_back() {
        let mut cuts = Cuts::new(10 * ALIGN + 100);
        let pieces: Vec<_> = (0..10).map(|_| cuts.take(ALIGN - 3).unwrap()).collect();
        assert_eq!(pieces, (0..10).map(|it| it * ALIGN).collect::<Vec<_>>());
        assert_eq!(cuts.take(1), None, "what is left is less than a piece");
        for number in [3, 5, 4, 9, 0] {
            cuts.give(pieces[number]);
            cuts.give(pieces[number]);
        }
        cuts.give(7);
        assert_eq!(cuts.take(3 * ALIGN), Some(3 * ALIGN));
        assert_eq!(cuts.take(2 * ALIGN), None);
        assert_eq!(cuts.take(0), Some(0), "the smallest that fits");
        for begin in [0, 1, 2, 3, 6, 7, 8].map(|it| it * ALIGN) {
            cuts.give(begin);
        }
        assert_eq!(cuts.take(10 * ALIGN + 1), None);
        assert_eq!(cuts.take(10 * ALIGN), Some(0));
        assert_eq!(cuts.take(usize::MAX), None);
    }
}

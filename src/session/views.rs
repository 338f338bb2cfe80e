//! How many views a group has filled, by which they take turns.

/// Captures with views of a group that may take turns.
const MOST_CAPTURES: usize = 4;

/// Outside of captures, and in the last ones. Each capture counts from 0 on: so the views of a graph have the same banks
/// as those of any other that has as many before, and ranks may replay graphs of different sizes beside each other.
#[derive(Default)]
pub(super) struct Views {
    outside: usize,
    /// By the capture's number, the latest one last.
    captured: Vec<(u64, usize)>,
}

impl Views {
    /// The views of `capture`, or outside of any.
    pub fn count(&mut self, capture: Option<u64>) -> &mut usize {
        let Some(capture) = capture else { return &mut self.outside };
        if !self.captured.iter().any(|it| it.0 == capture) {
            if self.captured.len() == MOST_CAPTURES {
                self.captured.remove(0);
            }
            self.captured.push((capture, 0));
        }
        let found = self.captured.iter_mut().find(|it| it.0 == capture);
        found.map_or(&mut self.outside, |it| &mut it.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_capture_counts_by_itself() {
        let mut views = Views::default();
        *views.count(None) += 3;
        for capture in [7, 8, 7, 9, 10] {
            *views.count(Some(capture)) += 1;
        }
        assert_eq!([7, 8, 9].map(|it| *views.count(Some(it))), [2, 1, 1]);
        assert_eq!(*views.count(None), 3);
        assert_eq!(*views.count(Some(11)), 0);
        assert_eq!(*views.count(Some(7)), 0, "the oldest is forgotten");
    }
}

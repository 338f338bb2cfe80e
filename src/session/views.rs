//! Which dispatch owns which view: a group's banks of views take turns.

use crate::model::ops::ViewBank;

/// The views that a group has filled. Calls and captures take turns together, so the views of graphs that are captured
/// one after the other may overlap.
#[derive(Default)]
pub(super) struct Views {
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
    pub fn next(&self) -> ViewBank {
        self.next
    }

    /// Records that the next bank was filled.
    pub fn fill(&mut self, is_captured: bool) -> View {
        let bank = self.next;
        self.next = bank.next();
        let count = self.count(bank, is_captured);
        *count += 1;
        View { bank, is_captured, number: *count }
    }

    /// Whether its bank was filled again since, in the same way.
    pub fn has_ended(&mut self, view: View) -> bool {
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

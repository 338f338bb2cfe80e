//! Captured operations, and how long the first of them has run in a replay.
//!
//! The library does not see graph launches. Each captured operation has a place, which says in every replay since when
//! it has been under way. Operations of a transport run one after the other here, too: time counts for the one that
//! began first, since it was found to be that one.

use crate::backend::nccl::own::InGraphs;
use crate::backend::net::two_sided::{Late, Operation, Recent, distinct};
use crate::error::Result;
use crate::model::ids::GroupRank;
use crate::model::ops::Stream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many captured operations get a place of their own: the exchanges of a model with 60 layers, captured for 90
/// batch sizes. Further ones share places: then a report cannot tell which of two waits, and if both are under way at
/// the same time, there may be no deadline.
const PLACES: usize = 16 << 10;

/// Marks that captured operations leave in each replay.
pub trait ReplayMarks: Send + Sync {
    /// Captures on `stream` the begin of the operation of `place`. Like any launch it may block on a call that
    /// synchronizes the device.
    fn begin(&self, place: usize, stream: Stream) -> Result<()>;
    /// Captures its end.
    fn end(&self, place: usize, stream: Stream) -> Result<()>;
    /// Whether a live graph, or something made from it, has any of them.
    fn are_in_graphs(&self) -> bool;
    /// When the operation of `place` began in a running replay, by a clock of the device; 0 if none is running.
    fn began(&self, place: usize) -> u64;
}

/// Creates marks with that many places; none for a device without graphs.
pub type NewReplayMarks<'a> = &'a dyn Fn(usize) -> Result<Option<Arc<dyn ReplayMarks>>>;

/// Captured operations.
#[derive(Default)]
pub struct Replays {
    /// `None` on a device without graphs.
    marks: Option<Arc<dyn ReplayMarks>>,
    captured: Vec<Captured>,
    operations: usize,
    first: Option<First>,
}

/// A mark to be captured. Capturing may block, so it must not hold up whoever ends what it blocks on.
#[must_use]
pub struct Mark {
    marks: Arc<dyn ReplayMarks>,
    place: usize,
    begins: bool,
}

impl Mark {
    /// Captures it on `stream`.
    pub fn capture(&self, stream: Stream) -> Result<()> {
        if self.begins { self.marks.begin(self.place, stream) } else { self.marks.end(self.place, stream) }
    }
}

struct Captured {
    operation: Operation,
    peers: Vec<GroupRank>,
    /// An earlier operation has the same place, and may still use it.
    is_shared: bool,
}

/// The first of the operations under way, at the last look.
struct First {
    place: usize,
    began: u64,
    /// When it was found to be the first.
    seen: Instant,
}

impl Replays {
    /// No captured operations yet; `new_marks` creates their marks.
    pub fn new(new_marks: NewReplayMarks<'_>) -> Result<Self> {
        Ok(Self { marks: new_marks(PLACES)?, ..Self::default() })
    }

    /// Records that `operation` with `peers` is about to be captured. Returns the mark to capture before it.
    pub fn begin(&mut self, operation: Operation, peers: &[GroupRank]) -> Option<Mark> {
        let marks = Arc::clone(self.marks.as_ref()?);
        let place = self.operations % PLACES;
        let captured = Captured { operation, peers: distinct(peers), is_shared: self.operations >= PLACES };
        match self.captured.get_mut(place) {
            Some(before) => *before = captured,
            None => self.captured.push(captured),
        }
        self.operations += 1;
        Some(Mark { marks, place, begins: true })
    }

    /// Records that `operation` was captured. Returns the mark to capture behind it; none if a later one has begun.
    pub fn end(&self, operation: Operation) -> Option<Mark> {
        let marks = Arc::clone(self.marks.as_ref()?);
        let place = self.operations.checked_sub(1)? % PLACES;
        (self.captured.get(place)?.operation == operation).then_some(Mark { marks, place, begins: false })
    }

    /// Whether a live graph has any of them.
    pub fn are_in_graphs(&self) -> bool {
        (self.marks.as_ref()).is_some_and(|marks| marks.are_in_graphs())
    }

    /// A function that answers that later.
    pub fn in_graphs(&self) -> InGraphs {
        let marks = self.marks.clone();
        Box::new(move || marks.as_ref().is_some_and(|marks| marks.are_in_graphs()))
    }

    /// The operation under way that began first: when, its place, and the operation.
    fn first_under_way(&self) -> Option<(u64, usize, &Captured)> {
        let marks = self.marks.as_ref()?;
        let places = self.captured.iter().enumerate();
        let began = places.map(|(place, captured)| (marks.began(place), place, captured));
        began.filter(|(began, ..)| *began != 0).min_by_key(|(began, ..)| *began)
    }

    /// That operation, if any is under way.
    pub fn running(&self) -> Option<Recent> {
        let (_, _, captured) = self.first_under_way()?;
        Some(Recent { operation: captured.operation, peers: captured.peers.clone(), runs: true })
    }

    /// That operation, if it has been the first for longer than `limit` at `now`.
    pub fn late(&mut self, now: Instant, limit: Duration) -> Option<Late> {
        let before = self.first.take();
        let (began, place, captured) = self.first_under_way()?;
        let is_same = |first: &First| (first.place, first.began) == (place, began);
        let seen = before.filter(is_same).map_or(now, |first| first.seen);
        let waited = now.saturating_duration_since(seen);
        let late = (waited > limit).then(|| Late {
            operation: captured.operation,
            peers: captured.peers.clone(),
            waited,
            is_replayed: true,
            is_shared: captured.is_shared,
            behind: None,
        });
        self.first = Some(First { place, began, seen });
        late
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::net::two_sided::Label;
    use parking_lot::Mutex;

    const SECOND: Duration = Duration::from_secs(1);
    const CAPTURED: Stream = Stream(7);

    /// Places that the test sets.
    #[derive(Clone, Default)]
    struct Marks {
        places: Arc<Mutex<[u64; 4]>>,
        calls: Arc<Mutex<String>>,
    }

    impl ReplayMarks for Marks {
        fn begin(&self, place: usize, _stream: Stream) -> Result<()> {
            *self.calls.lock() += &format!("b{place}");
            Ok(())
        }
        fn end(&self, place: usize, _stream: Stream) -> Result<()> {
            *self.calls.lock() += &format!("e{place}");
            Ok(())
        }
        fn are_in_graphs(&self) -> bool {
            false
        }
        fn began(&self, place: usize) -> u64 {
            self.places.lock().get(place).copied().unwrap_or(0)
        }
    }

    fn operation(number: u64) -> Operation {
        Operation { number, label: Label { what: "test", number } }
    }

    fn with_two() -> (Marks, Replays) {
        let marks = Marks::default();
        let mut replays = Replays { marks: Some(Arc::new(marks.clone())), ..Replays::default() };
        for (number, peers) in [(4, [1, 1]), (9, [2, 3])] {
            let peers = peers.map(GroupRank::new);
            let begin = replays.begin(operation(number), &peers).unwrap();
            begin.capture(CAPTURED).unwrap();
            replays.end(operation(number)).unwrap().capture(CAPTURED).unwrap();
        }
        (marks, replays)
    }

    fn numbers(ranks: Vec<GroupRank>) -> Vec<usize> {
        ranks.into_iter().map(GroupRank::index).collect()
    }

    #[test]
    fn each_captured_operation_has_a_place() {
        let (marks, replays) = with_two();
        assert_eq!(*marks.calls.lock(), "b0e0b1e1");
        // Another that was not captured came in between.
        assert!(replays.end(operation(3)).is_none());
    }

    #[test]
    fn of_more_operations_than_places_it_is_not_known_which_one_waits() {
        let (marks, mut replays) = with_two();
        let last = PLACES as u64;
        for number in 2..=last {
            let _ = replays.begin(operation(number), &[GroupRank::new(1)]).unwrap();
        }
        let start = Instant::now();
        let mut late = |places: [u64; 4]| {
            *marks.places.lock() = places;
            replays.late(start, SECOND);
            let late = replays.late(start + 2 * SECOND, SECOND).unwrap();
            (late.operation.number, late.is_shared)
        };
        assert_eq!(late([0, 100, 0, 0]), (9, false));
        assert_eq!(late([0, 0, 0, 100]), (3, false));
        assert_eq!(late([100, 0, 0, 0]), (last, true));
    }

    #[test]
    fn time_counts_for_the_first_of_one_replay() {
        let (marks, mut replays) = with_two();
        let start = Instant::now();
        let mut late = |after: u32, places: [u64; 4]| {
            *marks.places.lock() = places;
            let late = replays.late(start + after * SECOND, 3 * SECOND);
            late.map(|late| (late.operation.number, numbers(late.peers), late.waited.as_secs()))
        };
        assert_eq!(late(0, [0; 4]), None);
        // Running since 100, then in another replay since 500.
        assert_eq!(late(1, [100, 0, 0, 0]), None);
        assert_eq!(late(4, [100, 0, 0, 0]), None);
        assert_eq!(late(5, [500, 0, 0, 0]), None);
        // The other one waits for it.
        assert_eq!(late(6, [500, 600, 0, 0]), None);
        assert_eq!(late(8, [500, 600, 0, 0]), None);
        assert_eq!(late(9, [500, 600, 0, 0]), Some((4, vec![1], 4)));
        assert_eq!(late(10, [0, 600, 0, 0]), None);
        assert_eq!(late(13, [0, 600, 0, 0]), None);
        assert_eq!(late(14, [0, 600, 0, 0]), Some((9, vec![2, 3], 4)));
        assert_eq!(late(15, [0; 4]), None);
        assert_eq!(late(99, [0; 4]), None);
    }

    #[test]
    fn the_one_that_began_first_is_running() {
        let (marks, replays) = with_two();
        let running = |places: [u64; 4]| {
            *marks.places.lock() = places;
            replays.running().map(|it| (it.operation.number, numbers(it.peers)))
        };
        assert_eq!(running([0; 4]), None);
        assert_eq!(running([0, 600, 0, 0]), Some((9, vec![2, 3])));
        assert_eq!(running([500, 600, 0, 0]), Some((4, vec![1])));
    }

    #[test]
    fn places_of_nothing_captured_do_not_count() {
        let (marks, mut replays) = with_two();
        let start = Instant::now();
        *marks.places.lock() = [0, 0, 100, 0];
        assert!(replays.late(start, SECOND).is_none());
        assert!(replays.late(start + 9 * SECOND, SECOND).is_none());
    }

    #[test]
    fn there_is_nothing_to_look_at_before_a_capture_or_without_graphs() {
        let now = Instant::now();
        assert!(Replays::default().late(now, SECOND).is_none());
        let mut replays = Replays::default();
        assert!(replays.begin(operation(0), &[GroupRank::new(1)]).is_none());
        assert!(replays.end(operation(0)).is_none());
        assert!(replays.late(now + 9 * SECOND, SECOND).is_none());
    }
}

//! Unit tests of the teardown: its words, and ranks that arrive at the deadline.

use super::*;
use crate::model::node_view::tests::view;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const DONE: u32 = Word::Done as u32;
const LATE: u32 = Word::Late as u32;
const GONE: u32 = Word::Gone as u32;

/// Two ranks' words as rank 0 sees them. Rank 1's word changes when rank 0 announces its `n`th word.
struct Script {
    announced: Mutex<Vec<u32>>,
    peer: Mutex<u32>,
    reply: fn(usize) -> Option<u32>,
    arrives: fn(usize) -> Option<u32>,
}

impl Script {
    /// Rank 1 writes `reply(n)` to all windows, and `arrives(n)` only to its own.
    fn new(reply: fn(usize) -> Option<u32>, arrives: fn(usize) -> Option<u32>) -> Self {
        Self { announced: Mutex::default(), peer: Mutex::default(), reply, arrives }
    }

    fn last(&self) -> u32 {
        self.announced.lock().last().copied().unwrap_or(0)
    }
}

impl Words for Script {
    fn announce(&self, word: u32) -> Result<()> {
        let mut announced = self.announced.lock();
        announced.push(word);
        if let Some(reply) = (self.reply)(announced.len()) {
            *self.peer.lock() = reply;
        }
        Ok(())
    }

    fn words_here(&self) -> Result<Vec<u32>> {
        Ok(vec![self.last(), *self.peer.lock()])
    }

    fn words_at_home(&self) -> Result<Vec<u32>> {
        let count = self.announced.lock().len();
        let at_home = (self.arrives)(count).unwrap_or(*self.peer.lock());
        Ok(vec![self.last(), at_home])
    }
}

fn teardown<W: Words>(words: W, rank: usize, ranks: usize, timeout: Duration) -> Teardown<W> {
    Teardown::new(words, Arc::new(view(&"a".repeat(ranks), rank)), timeout)
}

const NO_TIME: Duration = Duration::ZERO;
const LONG: Duration = Duration::from_secs(60);

#[test]
fn ranks_that_come_leave_together() {
    let end = |peer, stays| {
        let words = Script::new(|_| None, |_| None);
        *words.peer.lock() = peer;
        teardown(words, 0, 2, LONG).leave_together(stays)
    };
    let stays = Word::Stays as u32;
    assert_eq!(end(DONE, false), Ok(End::Together { meet: true }));
    assert_eq!(end(stays, false), Ok(End::Together { meet: false }));
    assert_eq!(end(DONE, true), Ok(End::Together { meet: false }));
    assert_eq!(end(GONE, false), Ok(End::Broken));
}

#[test]
fn a_missing_rank_is_named_at_the_deadline() {
    let teardown = teardown(Script::new(|_| None, |_| None), 0, 2, NO_TIME);
    let error = teardown.leave_together(false).unwrap_err();
    assert_eq!(error.text(), "rank 0 of 2 waited 0 ms for rank 1 to destroy the group");
    assert_eq!(*teardown.words.announced.lock(), [DONE, LATE, GONE]);
}

#[test]
fn who_comes_just_at_the_deadline_is_not_left_behind() {
    // At rank 0's deadline, rank 1's word is only in rank 1's own window: rank 1 may have seen that all are done.
    let words = Script::new(|count| (count == 3).then_some(DONE), |count| (count == 2).then_some(DONE));
    let teardown = teardown(words, 0, 2, NO_TIME);
    assert_eq!(teardown.leave_together(false), Ok(End::Together { meet: true }));
    assert_eq!(*teardown.words.announced.lock(), [DONE, LATE, Word::Back as u32]);
}

#[test]
fn last_words_say_who_still_maps_what() {
    let parting = |peer: u32, unmapped| {
        let words = Script::new(|_| None, |_| None);
        *words.peer.lock() = peer;
        teardown(words, 0, 2, NO_TIME).part(unmapped)
    };
    let (unmapped, mapped) = (Word::Unmapped as u32, Word::StillMapped as u32);
    assert_eq!(parting(unmapped, true), Ok(Parting::AllUnmapped));
    assert_eq!(parting(unmapped, false), Ok(Parting::SomeMapped));
    assert_eq!(parting(mapped, true), Ok(Parting::SomeMapped));
    // Rank 1 may still announce `Late` and `Back`.
    assert_eq!(parting(DONE, true), Ok(Parting::SomeMissing));
}

#[test]
fn who_has_said_the_last_word_is_done_and_meets_nobody() {
    for word in [Word::Unmapped, Word::StillMapped] {
        let words = Script::new(|_| None, |_| None);
        *words.peer.lock() = word as u32;
        assert_eq!(teardown(words, 0, 2, LONG).leave_together(false), Ok(End::Together { meet: false }));
    }
}

/// Windows of all ranks: `[owner][sender]`.
struct Shared<'a> {
    rank: usize,
    windows: &'a [Vec<Mutex<u32>>],
    announced: &'a AtomicUsize,
}

impl Words for Shared<'_> {
    fn announce(&self, word: u32) -> Result<()> {
        let ranks = self.windows.len();
        for step in 0..ranks {
            *self.windows[(self.rank + step) % ranks][self.rank].lock() = word;
            self.announced.fetch_add(1, Ordering::Relaxed);
            std::thread::yield_now();
        }
        Ok(())
    }

    fn words_here(&self) -> Result<Vec<u32>> {
        Ok(self.windows[self.rank].iter().map(|it| *it.lock()).collect())
    }

    fn words_at_home(&self) -> Result<Vec<u32>> {
        let ranks = 0..self.windows.len();
        Ok(ranks.map(|rank| *self.windows[rank][rank].lock()).collect())
    }
}

#[test]
fn all_ranks_come_to_the_same_conclusion() {
    const RANKS: usize = 3;
    let (mut together, mut broken) = (0, 0);
    for round in 0..400_u64 {
        let windows: Vec<Vec<Mutex<u32>>> = (0..RANKS).map(|_| (0..RANKS).map(|_| Mutex::new(0)).collect()).collect();
        let announced = AtomicUsize::new(0);
        let stays = round % 2 == 1;
        let ends: Vec<Result<End>> = std::thread::scope(|scope| {
            let begin = |rank: usize| {
                let (windows, announced) = (&windows, &announced);
                scope.spawn(move || {
                    // The last rank arrives around the deadline of the first.
                    std::thread::sleep(Duration::from_micros(round * 7 % 400 * rank as u64));
                    let words = Shared { rank, windows, announced };
                    let teardown = teardown(words, rank, RANKS, Duration::from_micros(400));
                    let end = teardown.leave_together(stays && rank == 0)?;
                    // Other ranks may not have seen this rank's earlier words yet.
                    if end == (End::Together { meet: false }) {
                        assert_eq!(teardown.part(rank != 0)?, Parting::SomeMapped);
                    }
                    Ok(end)
                })
            };
            let threads: Vec<_> = (0..RANKS).map(begin).collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });
        let all = Ok(End::Together { meet: !stays });
        match ends.iter().filter(|&end| *end == all).count() {
            RANKS => together += 1,
            0 => broken += 1,
            _ => panic!("round {round}: {ends:?}"),
        }
    }
    assert_eq!(together + broken, 400);
}

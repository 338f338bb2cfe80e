//! Teardown of a group: ranks leave through words in each other's windows, not through NCCL.
//!
//! A rank that knows of a failure leaves without waiting. In an exchange over NCCL the others would
//! wait for it, and match its next exchange with this one.
//!
//! All ranks reach the same conclusion, even if one's deadline passes just when the last rank comes
//! and others already leave together. A rank past its deadline announces `Late` to all, then checks
//! whether a rank is missing: if so it announces `Gone`, else `Back`. Each word goes to the sender's
//! own window first, and the late rank checks those windows. So a rank that saw all `Done` twice,
//! the late one's too, saw them before `Late`. They were in their senders' own windows by then,
//! where the late rank finds them.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::error::{Code, Error, Result};
use crate::model::tensor::DevPtr;
use crate::model::topology::LocalRanks;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Least time to wait for a rank that has announced a word.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);

/// Bytes of a word.
pub const WORD_BYTES: usize = size_of::<u32>();

/// A rank's word about itself; windows start with zeros, which mean that it is still in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Word {
    /// Its kernels are done, and it waits for the others.
    Done = 1,
    /// It waits for nobody.
    Gone = 2,
    /// As `Done`, but it cannot unmap the others' windows now, so no meeting for that is needed.
    Stays = 3,
    /// Its deadline has passed, and it checks once more.
    Late = 4,
    /// No rank was missing then: it keeps waiting.
    Back = 5,
    /// As `Back`, of a rank that has announced `Stays`.
    BackAndStays = 6,
}

impl Word {
    fn of(bits: u32) -> Option<Self> {
        let all = [
            Self::Done,
            Self::Gone,
            Self::Stays,
            Self::Late,
            Self::Back,
            Self::BackAndStays,
        ];
        all.into_iter().find(|word| *word as u32 == bits)
    }
}

/// How a group ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All kernels of all ranks are done. All ranks know whether they `meet` once more, to exchange
    /// who has unmapped whose window.
    Together { meet: bool },
    /// Some rank left earlier: its kernels may still write to this rank's window.
    Broken,
}

/// One rank's words in the windows of all ranks.
pub struct Teardown<W = Windows> {
    words: W,
    ranks: LocalRanks,
    of_group: usize,
    timeout: Duration,
}

/// Access to the words of all ranks.
pub trait Words {
    /// Writes this rank's `word` to its own window, then to all others.
    fn announce(&self, word: u32) -> Result<()>;
    /// The word of each rank in this rank's window.
    fn words_here(&self) -> Result<Vec<u32>>;
    /// The word of each rank in its own window.
    fn words_at_home(&self) -> Result<Vec<u32>>;
}

impl<W: Words> Teardown<W> {
    /// The words of one of `ranks`, which map each other's windows; `of_group` is the number of ranks on all nodes.
    pub fn new(words: W, (ranks, of_group): (LocalRanks, usize), timeout: Duration) -> Self {
        Self {
            words,
            ranks,
            of_group,
            timeout,
        }
    }

    /// Leaves without waiting.
    pub fn leave(&self) -> Result<()> {
        self.words.announce(Word::Gone as u32)
    }

    /// Waits, with the deadline, until every rank has announced that it leaves. No kernel of this rank
    /// runs any more; `stays` if it cannot unmap the others' windows now.
    pub fn leave_together(&self, stays: bool) -> Result<End> {
        let (done, back) = match stays {
            false => (Word::Done, Word::Back),
            true => (Word::Stays, Word::BackAndStays),
        };
        self.words.announce(done as u32)?;
        let start = Instant::now();
        let mut pause = Duration::from_micros(20);
        let mut was_late = false;
        loop {
            let received = self.received()?;
            if received.contains(&Some(Word::Gone)) {
                self.leave()?;
                return Ok(End::Broken);
            }
            if all_are_done(&received) && all_are_done(&self.received()?) {
                let stays = [Some(Word::Stays), Some(Word::BackAndStays)];
                let meet = !received.iter().any(|word| stays.contains(word));
                return Ok(End::Together { meet });
            }
            // A second wait happens only for a rank that dies between `Late` and its next word.
            let more = match was_late {
                false => Duration::ZERO,
                true => self.timeout.max(LEAST_PATIENCE),
            };
            if start.elapsed() >= self.timeout + more {
                if !was_late {
                    self.words.announce(Word::Late as u32)?;
                }
                let home = self.words.words_at_home()?;
                let missing = match was_late {
                    false => home.iter().position(|&bits| bits == 0),
                    true => received.iter().position(|word| !is_done(word)),
                };
                if let Some(missing) = missing {
                    self.leave()?;
                    return Err(self.missed(missing));
                }
                self.words.announce(back as u32)?;
                was_late = true;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn received(&self) -> Result<Vec<Option<Word>>> {
        Ok(self.words.words_here()?.into_iter().map(Word::of).collect())
    }

    fn missed(&self, missing: usize) -> Error {
        let (own, other) = (self.ranks.own_rank(), self.ranks.rank(missing));
        let (all, waited) = (self.of_group, self.timeout.as_millis());
        Error::new(
            Code::RemoteError,
            format!("rank {own} of {all} waited {waited} ms for rank {other} to destroy the group"),
        )
    }
}

fn is_done(word: &Option<Word>) -> bool {
    !matches!(word, None | Some(Word::Late | Word::Gone))
}

fn all_are_done(words: &[Option<Word>]) -> bool {
    words.iter().all(is_done)
}

/// The words in the windows of all ranks.
pub struct Windows {
    memory: Arc<CudaMemory>,
    /// Per rank, this one included: the address of all ranks' words in its window.
    words: Vec<DevPtr>,
    rank: usize,
}

impl Windows {
    /// Words at `words` of each rank's window, one for each rank; `rank` is this one.
    pub fn new(memory: &Arc<CudaMemory>, words: Vec<DevPtr>, rank: usize) -> Self {
        Self {
            memory: Arc::clone(memory),
            words,
            rank,
        }
    }
}

impl Words for Windows {
    fn announce(&self, word: u32) -> Result<()> {
        let bytes = word.to_le_bytes();
        let own = self.words.get(self.rank).into_iter();
        let others = self.words.iter().enumerate();
        let others = others.filter_map(|(rank, words)| (rank != self.rank).then_some(words));
        own.chain(others).try_for_each(|words| {
            let address = DevPtr(words.0 + self.rank * WORD_BYTES);
            self.memory.upload(address, &bytes)
        })
    }

    fn words_here(&self) -> Result<Vec<u32>> {
        let mut bytes = vec![0; self.words.len() * WORD_BYTES];
        if let Some(&own) = self.words.get(self.rank) {
            self.memory.download(&mut bytes, own)?;
        }
        let words = bytes.as_chunks::<WORD_BYTES>().0;
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    fn words_at_home(&self) -> Result<Vec<u32>> {
        let of = |(rank, words): (usize, &DevPtr)| {
            let mut bytes = [0; WORD_BYTES];
            let address = DevPtr(words.0 + rank * WORD_BYTES);
            self.memory.download(&mut bytes, address)?;
            Ok(u32::from_le_bytes(bytes))
        };
        self.words.iter().enumerate().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const DONE: u32 = Word::Done as u32;
    const LATE: u32 = Word::Late as u32;
    const GONE: u32 = Word::Gone as u32;

    /// The words of two ranks as rank 0 sees them. Rank 1's word changes after the `n`th word of
    /// rank 0.
    struct Script {
        announced: Mutex<Vec<u32>>,
        peer: Mutex<u32>,
        reply: fn(usize) -> Option<u32>,
        arrives: fn(usize) -> Option<u32>,
    }

    impl Script {
        /// Rank 1 says `reply(n)` in all windows, and `arrives(n)` in its own alone.
        fn new(reply: fn(usize) -> Option<u32>, arrives: fn(usize) -> Option<u32>) -> Self {
            Self {
                announced: Mutex::default(),
                peer: Mutex::default(),
                reply,
                arrives,
            }
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
        Teardown::new(words, (LocalRanks::all(ranks, rank), ranks), timeout)
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
        let words = Script::new(|_| None, |_| None);
        let teardown = teardown(words, 0, 2, NO_TIME);
        let error = teardown.leave_together(false).unwrap_err();
        assert_eq!(
            error.text(),
            "rank 0 of 2 waited 0 ms for rank 1 to destroy the group"
        );
        assert_eq!(*teardown.words.announced.lock(), [DONE, LATE, GONE]);
    }

    #[test]
    fn who_comes_just_at_the_deadline_is_not_left_behind() {
        // At rank 0's deadline, rank 1's word is in rank 1's own window only: rank 1 may have seen
        // all done already.
        let words = Script::new(
            |count| (count == 3).then_some(DONE),
            |count| (count == 2).then_some(DONE),
        );
        let teardown = teardown(words, 0, 2, NO_TIME);
        let end = teardown.leave_together(false);
        assert_eq!(end, Ok(End::Together { meet: true }));
        let back = Word::Back as u32;
        assert_eq!(*teardown.words.announced.lock(), [DONE, LATE, back]);
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
            Ok(self.windows[self.rank]
                .iter()
                .map(|it| *it.lock())
                .collect())
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
            let windows: Vec<Vec<Mutex<u32>>> = (0..RANKS)
                .map(|_| (0..RANKS).map(|_| Mutex::new(0)).collect())
                .collect();
            let announced = AtomicUsize::new(0);
            let ends: Vec<Result<End>> = std::thread::scope(|scope| {
                let begin = |rank: usize| {
                    let (windows, announced) = (&windows, &announced);
                    scope.spawn(move || {
                        // The last rank comes around the deadline of the first.
                        let late = round * 7 % 400 * rank as u64;
                        std::thread::sleep(Duration::from_micros(late));
                        let words = Shared {
                            rank,
                            windows,
                            announced,
                        };
                        teardown(words, rank, RANKS, Duration::from_micros(400))
                            .leave_together(false)
                    })
                };
                let threads: Vec<_> = (0..RANKS).map(begin).collect();
                threads.into_iter().map(|it| it.join().unwrap()).collect()
            });
            let all = Ok(End::Together { meet: true });
            match ends.iter().filter(|&end| *end == all).count() {
                RANKS => together += 1,
                0 => broken += 1,
                _ => panic!("round {round}: {ends:?}"),
            }
        }
        assert_eq!(together + broken, 400);
    }
}

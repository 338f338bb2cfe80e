//! Teardown of a group: ranks agree on leaving by words in each other's windows, not over NCCL.
//!
//! Over NCCL the others would wait for a rank that leaves without waiting because it knows of a failure, and they would
//! match its next exchange with this one.
//!
//! All ranks come to the same result, even if the deadline of one passes just when the last one arrives and others
//! already leave together. A rank past its deadline announces `Late` to all, then checks whether a rank is missing: if
//! so it announces `Gone`, else `Back`. Every word is written to its sender's own window first, and it is these windows
//! that the late rank checks. A rank that leaves has seen all `Done` twice, including the late rank's, thus before
//! `Late`. By then all `Done` were in their senders' own windows, where the late rank finds them.
//!
//! A delayed word must not be taken for one of the next group that gets the window. So a window with words is reused
//! only after each rank's last word has come, or after an exchange that follows the last words.

use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::device::Memory;
use crate::error::{Code, Error, Result};
use crate::model::ids::LocalRank;
use crate::model::node_view::NodeView;
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The least timeout for a rank that has already announced a word.
const LEAST_TIMEOUT: Duration = Duration::from_secs(1);

pub const WORD_BYTES: usize = size_of::<u32>();

/// A rank's state in the teardown. Windows are initially zero: the rank has not begun to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Word {
    /// The rank's kernels have ended, and it waits for the others.
    Done = 1,
    /// The rank has left without waiting.
    Gone = 2,
    /// As `Done`, but the rank cannot unmap the others' windows now, so a meeting for that would be in vain.
    Stays = 3,
    /// The rank's deadline has passed, and it checks once more.
    Late = 4,
    /// After `Late`: no rank was missing, so the rank keeps waiting.
    Back = 5,
    /// As `Back`, from a rank that has announced `Stays`.
    BackAndStays = 6,
    /// Last word of a rank after all have left together: it does not map the others' windows any more.
    Unmapped = 7,
    /// Last word of a rank that could not unmap the others' windows.
    StillMapped = 8,
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
            Self::Unmapped,
            Self::StillMapped,
        ];
        all.into_iter().find(|word| *word as u32 == bits)
    }
}

/// How a group ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All kernels of all ranks have ended. All ranks know whether they `meet` once more, to exchange whether each has
    /// unmapped the others' windows.
    Together { meet: bool },
    /// Some rank left earlier: its kernels may still write to this rank's window.
    Broken,
}

/// What a rank knows of the others' mappings after all have left together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parting {
    /// No rank maps another's window any more.
    AllUnmapped,
    /// Some rank still maps others' windows, but no longer uses them.
    SomeMapped,
    /// Some rank has not written its last word in time, and may do so at any moment.
    SomeMissing,
}

/// One rank's part in the teardown.
pub struct Teardown<W = Windows> {
    words: W,
    view: Arc<NodeView>,
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
    /// For the ranks of this node, which map each other's windows.
    pub fn new(words: W, view: Arc<NodeView>, timeout: Duration) -> Self {
        Self { words, view, timeout }
    }

    /// Announces that this rank leaves without waiting.
    pub fn leave(&self) -> Result<()> {
        self.words.announce(Word::Gone as u32)
    }

    /// Waits until every rank has announced that it leaves, or until the deadline. To be called when no kernel of this
    /// rank runs any more; `stays` if this rank cannot unmap the others' windows now.
    pub fn leave_together(&self, stays: bool) -> Result<End> {
        let (done, back) = if stays { (Word::Stays, Word::BackAndStays) } else { (Word::Done, Word::Back) };
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
                return Ok(End::Together { meet: !received.iter().any(meets_nobody) });
            }
            // The second deadline can pass only if a rank dies between `Late` and its next word.
            let more = if was_late { self.timeout.max(LEAST_TIMEOUT) } else { Duration::ZERO };
            if start.elapsed() >= self.timeout + more {
                if !was_late {
                    self.words.announce(Word::Late as u32)?;
                }
                let home = self.words.words_at_home()?;
                let missing = if was_late {
                    received.iter().position(|word| !is_done(word))
                } else {
                    home.iter().position(|&bits| bits == 0)
                };
                if let Some(missing) = missing {
                    self.leave()?;
                    return Err(self.missed(LocalRank::new(missing)));
                }
                self.words.announce(back as u32)?;
                was_late = true;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// After [`Teardown::leave_together`]: announces whether this rank has `unmapped` the others' windows, and waits
    /// for the others' last words, after which no more words are written, or until the deadline.
    pub fn part(&self, unmapped: bool) -> Result<Parting> {
        let word = if unmapped { Word::Unmapped } else { Word::StillMapped };
        self.words.announce(word as u32)?;
        let start = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            let received = self.received()?;
            let is_last = |word: &Option<Word>| matches!(word, Some(Word::Unmapped | Word::StillMapped));
            if received.iter().all(is_last) {
                return Ok(if received.contains(&Some(Word::StillMapped)) {
                    Parting::SomeMapped
                } else {
                    Parting::AllUnmapped
                });
            }
            if start.elapsed() >= self.timeout.max(LEAST_TIMEOUT) {
                return Ok(Parting::SomeMissing);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn received(&self) -> Result<Vec<Option<Word>>> {
        Ok(self.words.words_here()?.into_iter().map(Word::of).collect())
    }

    fn missed(&self, missing: LocalRank) -> Error {
        let (own, other) = (self.view.rank, self.view.rank_of(missing));
        let (all, waited) = (self.view.topology.ranks(), self.timeout.as_millis());
        Error::new(
            Code::RemoteError,
            format!("rank {own} of {all} waited {waited} ms for rank {other} to destroy the group"),
        )
    }
}

fn is_done(word: &Option<Word>) -> bool {
    !matches!(word, None | Some(Word::Late | Word::Gone))
}

/// Whether the word's rank does not meet the others. This includes last words, which replace a meeting, as this rank
/// may have missed the word before.
fn meets_nobody(word: &Option<Word>) -> bool {
    let words = [Word::Stays, Word::BackAndStays, Word::Unmapped, Word::StillMapped];
    word.is_some_and(|word| words.contains(&word))
}

fn all_are_done(words: &[Option<Word>]) -> bool {
    words.iter().all(is_done)
}

/// The words in the windows of all ranks.
pub struct Windows {
    memory: Arc<CudaMemory>,
    /// For each rank, including this one, the address of all ranks' words in its window.
    words: Vec<DevPtr>,
    rank: LocalRank,
}

impl Windows {
    /// Words at `words` of each rank's window, one for each rank; `rank` is this one.
    pub fn new(memory: &Arc<CudaMemory>, words: Vec<DevPtr>, rank: LocalRank) -> Self {
        Self { memory: Arc::clone(memory), words, rank }
    }
}

impl Words for Windows {
    fn announce(&self, word: u32) -> Result<()> {
        let bytes = word.to_le_bytes();
        let own = self.words.get(self.rank.index()).into_iter();
        let others = self.words.iter().enumerate();
        own.chain(others.filter_map(|(rank, words)| (rank != self.rank.index()).then_some(words)))
            .try_for_each(|words| self.memory.upload(DevPtr(words.0 + self.rank.index() * WORD_BYTES), &bytes))
    }

    fn words_here(&self) -> Result<Vec<u32>> {
        let mut bytes = vec![0; self.words.len() * WORD_BYTES];
        if let Some(&own) = self.words.get(self.rank.index()) {
            self.memory.download(&mut bytes, own)?;
        }
        Ok(bytes.as_chunks::<WORD_BYTES>().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    fn words_at_home(&self) -> Result<Vec<u32>> {
        let of = |(rank, words): (usize, &DevPtr)| {
            let mut bytes = [0; WORD_BYTES];
            self.memory.download(&mut bytes, DevPtr(words.0 + rank * WORD_BYTES))?;
            Ok(u32::from_le_bytes(bytes))
        };
        self.words.iter().enumerate().map(of).collect()
    }
}

#[cfg(test)]
#[path = "teardown_tests.rs"]
mod tests;

//! How the ranks of a group part: through words in each other's windows, not through NCCL.
//!
//! A rank that knows of a failure leaves without waiting. In an exchange over NCCL the others would miss
//! it there, and take part with it in whatever is exchanged next.
#![forbid(unsafe_code)]

use crate::backend::cuda::context::Context;
use crate::backend::cuda::driver::{self, THREAD_STREAM};
use crate::error::{Code, Error, Result};
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a word.
pub(super) const WORD_BYTES: usize = size_of::<u32>();

/// What a rank says of itself; windows start with zeros, which say that it is still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Word {
    /// Its kernels are done, and it waits for the others.
    Done = 1,
    /// It waits for nobody.
    Gone = 2,
}

/// Whether a group ends in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// All kernels of all ranks are done.
    Together,
    /// Some rank left before: its kernels may still write to this rank's window.
    Broken,
}

/// One rank's words in the windows of all ranks.
#[derive(Debug)]
pub(super) struct Parting {
    context: Arc<Context>,
    /// For each rank, this one too, where the words of all ranks begin in its window.
    words: Vec<DevPtr>,
    rank: usize,
    timeout: Duration,
}

impl Parting {
    /// Words at `words` of each rank's window, one for each rank; `rank` is this one.
    pub(super) fn new(
        context: &Arc<Context>,
        words: Vec<DevPtr>,
        rank: usize,
        timeout: Duration,
    ) -> Self {
        Self {
            context: Arc::clone(context),
            words,
            rank,
            timeout,
        }
    }

    /// Leaves without waiting.
    pub(super) fn leave(&self) -> Result<()> {
        self.tell(Word::Gone)
    }

    /// Waits, with the deadline, until every rank has said that it leaves. No kernel of this rank runs
    /// any more.
    pub(super) fn leave_together(&self) -> Result<End> {
        self.tell(Word::Done)?;
        let start = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            let said = self.said()?;
            if said.contains(&(Word::Gone as u32)) {
                self.leave()?;
                return Ok(End::Broken);
            }
            let Some(missing) = said.iter().position(|&word| word != Word::Done as u32) else {
                return Ok(End::Together);
            };
            if start.elapsed() > self.timeout {
                self.leave()?;
                return Err(self.missed(missing));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn tell(&self, word: Word) -> Result<()> {
        let _entered = self.context.enter()?;
        let bytes = (word as u32).to_le_bytes();
        for words in &self.words {
            let own = DevPtr(words.0 + self.rank * WORD_BYTES);
            driver::upload(own, &bytes, THREAD_STREAM)?;
        }
        Ok(())
    }

    /// What each rank has told this one.
    fn said(&self) -> Result<Vec<u32>> {
        let _entered = self.context.enter()?;
        let mut bytes = vec![0; self.words.len() * WORD_BYTES];
        if let Some(&own) = self.words.get(self.rank) {
            driver::download(&mut bytes, own, THREAD_STREAM)?;
        }
        let words = bytes.as_chunks::<WORD_BYTES>().0;
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    fn missed(&self, missing: usize) -> Error {
        Error::new(
            Code::RemoteError,
            format!(
                "rank {} of {} waited {} ms for rank {missing} to destroy the group",
                self.rank,
                self.words.len(),
                self.timeout.as_millis()
            ),
        )
    }
}

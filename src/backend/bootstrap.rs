//! Small exchanges over the caller's communicator, while groups and handles are created.
//!
//! They use ncclAllGather only, so any NCCL serves. All waits of a call share the group's deadline:
//! if a rank never arrives, the others return an error. NCCL may notice a lost rank itself and then
//! end the collective as if it were complete, or with an error of the stream. So each rank seals
//! its contribution with a checksum.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::nccl::Communicator;
use crate::error::{Code, Error, Result, Words};
use crate::model::hash::fnv1a;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes of the verdict that each rank puts in front of its payload: a code, then text.
const VERDICT_BYTES: usize = 512;
const CODE_BYTES: usize = 4;
/// Bytes of the seal in front of each rank's contribution.
const SEAL_BYTES: usize = size_of::<u64>();
/// Enough for the records of a group's creation on eight ranks.
const LEAST_BUFFER_BYTES: usize = 64 << 10;

/// Exchanges among the ranks of a communicator.
pub struct Bootstrap {
    comm: Communicator,
    memory: Arc<dyn DeviceMemory>,
    timeout: Duration,
    words: Words,
    /// Kept for the next exchange: allocating may wait for the whole device.
    buffer: Mutex<Option<Buffer>>,
    /// Number of exchanges so far, the same on every rank.
    exchanges: AtomicU64,
    /// How long this call has waited already.
    waited: Mutex<Duration>,
    lost: OnceCell<Error>,
}

struct Buffer {
    data: DevPtr,
    bytes: usize,
}

impl Bootstrap {
    /// Exchanges over `comm`, with buffers in `memory`; `words` phrases refusals for the other
    /// ranks.
    pub fn new(
        comm: Communicator,
        memory: Arc<dyn DeviceMemory>,
        timeout: Duration,
        words: Words,
    ) -> Self {
        Self {
            comm,
            memory,
            timeout,
            words,
            buffer: Mutex::default(),
            exchanges: AtomicU64::new(0),
            waited: Mutex::default(),
            lost: OnceCell::new(),
        }
    }

    /// The error of an exchange that other ranks never joined, or were lost in. That exchange may
    /// be stuck on its stream for ever, so no other can follow.
    pub fn lost(&self) -> Option<Error> {
        self.lost.get().cloned()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.comm.ranks
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.comm.rank
    }

    /// Phrases a refusal for the other ranks.
    pub fn words(&self) -> Words {
        self.words
    }

    /// The memory of the device that the group runs on.
    pub fn memory(&self) -> &Arc<dyn DeviceMemory> {
        &self.memory
    }

    /// The payloads of all ranks, in rank order. Collective; `mine` has the same length everywhere.
    pub fn all_gather(&self, mine: &[u8], stream: Stream) -> Result<Vec<Vec<u8>>> {
        if mine.is_empty() {
            return Ok(vec![Vec::new(); self.ranks()]);
        }
        if let Some(lost) = self.lost() {
            return Err(lost);
        }
        let start = Instant::now();
        let mut kept = self.buffer.lock();
        let exchange = self.exchanges.fetch_add(1, Ordering::Relaxed) + 1;
        let sealed = [&seal(exchange, mine).to_le_bytes(), mine].concat();
        let total = sealed.len() * self.ranks();
        // A running exchange owns the buffer; after a failure the buffer is not used again.
        let buffer = self.enough(kept.take(), total + sealed.len())?;
        let gathered = buffer.data;
        let own = DevPtr(gathered.0 + total);
        self.memory.upload(own, &sealed)?;
        let _under_way = self.memory.begin();
        self.comm.all_gather(own, gathered, sealed.len(), stream)?;
        let waited = self.watch(stream);
        let mut bytes = vec![0; total];
        match &waited {
            // The other ranks have this rank's contribution and continue with it.
            Ok(()) => self
                .memory
                .download(&mut bytes, gathered)
                .map_err(|error| self.lost.get_or_init(|| error).clone())?,
            Err(Waited::TooLong(error)) => {
                self.memory.strand(stream);
                return Err(self.lost.get_or_init(|| error.clone()).clone());
            }
            // The received bytes are only a hint, and the memory may be out of reach.
            Err(Waited::Broken(_)) => drop(self.memory.download(&mut bytes, gathered)),
        }
        let records = bytes.chunks_exact(sealed.len());
        let payloads: Vec<_> = records.map(|record| unsealed(exchange, record)).collect();
        let cause = waited.err().and_then(Waited::cause);
        if cause.is_some() || payloads.contains(&None) {
            let missing = self.missing(&payloads);
            let error = self.gave_up(&missing, start, cause);
            return Err(self.lost.get_or_init(|| error).clone());
        }
        *kept = Some(buffer);
        Ok(payloads.into_iter().flatten().map(<[u8]>::to_vec).collect())
    }

    /// The other ranks whose payloads did not arrive.
    fn missing(&self, payloads: &[Option<&[u8]>]) -> Vec<usize> {
        let ranks = payloads.iter().enumerate();
        ranks
            .filter(|&(rank, payload)| payload.is_none() && rank != self.rank())
            .map(|(rank, _)| rank)
            .collect()
    }

    /// The error when NCCL ended an exchange without `missing`; `cause` is the stream's error.
    fn gave_up(&self, missing: &[usize], start: Instant, cause: Option<Error>) -> Error {
        let text = format!(
            "rank {} of {} waited {} ms for {} in an exchange of all ranks, and NCCL gave it up{}",
            self.rank(),
            self.ranks(),
            start.elapsed().as_millis(),
            named(missing),
            cause.map_or_else(String::new, |cause| format!(": {cause}"))
        );
        Error::new(Code::RemoteError, text)
    }

    /// A buffer of at least `bytes`: `old` if it is large enough.
    fn enough(&self, old: Option<Buffer>, bytes: usize) -> Result<Buffer> {
        match old {
            Some(buffer) if buffer.bytes >= bytes => Ok(buffer),
            old => {
                if let Some(old) = old {
                    self.memory.free_own(old.data, old.bytes);
                }
                let bytes = bytes.max(LEAST_BUFFER_BYTES);
                Ok(Buffer {
                    data: self.memory.alloc_own(bytes)?,
                    bytes,
                })
            }
        }
    }

    /// Exchanges payloads of `bytes` bytes if every rank is well; otherwise all ranks fail, each
    /// naming the first that refused.
    pub fn agree(
        &self,
        mine: Result<Vec<u8>>,
        bytes: usize,
        stream: Stream,
    ) -> Result<Vec<Vec<u8>>> {
        let mut record = vec![0; VERDICT_BYTES + bytes];
        match &mine {
            Ok(payload) => copy_prefix(&mut record, VERDICT_BYTES, payload),
            Err(error) => {
                copy_prefix(&mut record, 0, &(error.code() as i32).to_le_bytes());
                copy_prefix(
                    &mut record,
                    CODE_BYTES,
                    clip(&(self.words)(error)).as_bytes(),
                );
            }
        }
        let mut records = match (mine, self.all_gather(&record, stream)) {
            (Ok(_), gathered) => gathered?,
            (Err(mine), Ok(_)) => return Err(mine),
            // The caller needs both errors: what to repair, and that the communicator is no longer
            // usable.
            (Err(mine), Err(lost)) => return Err(mine.and(lost)),
        };
        for (rank, record) in records.iter().enumerate() {
            if let Some(text) = refusal(record) {
                return Err(Error::new(
                    Code::RemoteError,
                    format!("rank {rank} refused: {text}"),
                ));
            }
        }
        for record in &mut records {
            record.drain(..VERDICT_BYTES);
        }
        Ok(records)
    }

    /// Starts a call with a deadline of its own.
    pub fn begin_call(&self) {
        *self.waited.lock() = Duration::ZERO;
    }

    /// Runs `wait` as part of the call; its argument is the time that is left.
    pub fn within_deadline<T>(&self, wait: impl FnOnce(Duration) -> T) -> T {
        let start = Instant::now();
        let left = self.timeout.saturating_sub(*self.waited.lock());
        let waited = wait(left);
        *self.waited.lock() += start.elapsed();
        waited
    }

    /// Waits until everything enqueued on `stream` has run.
    pub fn wait(&self, stream: Stream) -> Result<()> {
        self.watch(stream).map_err(|waited| match waited {
            Waited::TooLong(error) | Waited::Broken(error) => error,
        })
    }

    fn watch(&self, stream: Stream) -> std::result::Result<(), Waited> {
        self.within_deadline(|left| {
            let start = Instant::now();
            let mut pause = Duration::from_micros(10);
            while !self.memory.is_idle(stream).map_err(Waited::Broken)? {
                if start.elapsed() > left {
                    return Err(Waited::TooLong(self.missed()));
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
            Ok(())
        })
    }

    fn missed(&self) -> Error {
        Error::new(
            Code::RemoteError,
            format!(
                "rank {} of {} waited {} ms for the other ranks in an exchange of all ranks",
                self.rank(),
                self.ranks(),
                self.timeout.as_millis()
            ),
        )
    }
}

/// Why a wait for a stream failed.
enum Waited {
    /// The deadline passed while work still ran.
    TooLong(Error),
    /// The stream has an error.
    Broken(Error),
}

impl Waited {
    fn cause(self) -> Option<Error> {
        match self {
            Self::TooLong(_) => None,
            Self::Broken(error) => Some(error),
        }
    }
}

/// Ranks as text; an empty list stands for unknown ranks.
fn named(ranks: &[usize]) -> String {
    match ranks {
        [] => "another rank".to_owned(),
        [rank] => format!("rank {rank}"),
        ranks => {
            let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
            format!("ranks {}", names.join(", "))
        }
    }
}

impl Drop for Bootstrap {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.lock().take() {
            self.memory.free_own(buffer.data, buffer.bytes);
        }
    }
}

/// A checksum of an exchange's number and a rank's payload.
fn seal(exchange: u64, payload: &[u8]) -> u64 {
    fnv1a(exchange.to_le_bytes().iter().chain(payload))
}

/// The payload of a sealed record; `None` if it is missing or incomplete.
fn unsealed(exchange: u64, record: &[u8]) -> Option<&[u8]> {
    let (sealed, payload) = record.split_first_chunk::<SEAL_BYTES>()?;
    (u64::from_le_bytes(*sealed) == seal(exchange, payload)).then_some(payload)
}

/// The text of a refusing rank's record; `None` if that rank agreed.
fn refusal(record: &[u8]) -> Option<String> {
    let (verdict, _) = record.split_at_checked(VERDICT_BYTES)?;
    let (code, text) = verdict.split_at_checked(CODE_BYTES)?;
    if code.iter().all(|&byte| byte == 0) {
        return None;
    }
    let end = text
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(text.len());
    Some(String::from_utf8_lossy(text.get(..end).unwrap_or_default()).into_owned())
}

/// As much of `text` as a verdict holds, cut between characters.
fn clip(text: &str) -> &str {
    let most = VERDICT_BYTES - CODE_BYTES;
    let end = (0..=text.len().min(most))
        .rev()
        .find(|&end| text.is_char_boundary(end));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

fn copy_prefix(to: &mut [u8], offset: usize, from: &[u8]) {
    for (to, from) in to.iter_mut().skip(offset).zip(from) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_survives_its_record() {
        let mut record = vec![0; VERDICT_BYTES];
        assert_eq!(refusal(&record), None);
        copy_prefix(&mut record, 0, &4_i32.to_le_bytes());
        copy_prefix(
            &mut record,
            CODE_BYTES,
            "config.version: must be 1".as_bytes(),
        );
        assert_eq!(
            refusal(&record).as_deref(),
            Some("config.version: must be 1")
        );
    }

    #[test]
    fn a_seal_is_of_one_exchange_and_of_all_bytes() {
        let payload = [1, 2, 3];
        assert_eq!(seal(1, &payload), seal(1, &payload));
        assert_ne!(seal(1, &payload), seal(2, &payload));
        assert_ne!(seal(1, &payload), seal(1, &[1, 2, 0]));
        // What NCCL leaves in place of a lost rank's record.
        assert_ne!(seal(1, &[0; 16]), 0);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let text = "é".repeat(VERDICT_BYTES);
        assert!(clip(&text).len() <= VERDICT_BYTES - CODE_BYTES);
        assert_eq!(clip("short"), "short");
    }
}

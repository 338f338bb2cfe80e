//! Small exchanges over the caller's communicator, while groups and handles are created.
//!
//! They use ncclAllGather only, so any NCCL will do. All waits of a call share the group's deadline: if a rank never
//! arrives, the others return an error. NCCL may notice a lost rank first and end the collective as if it were
//! complete, or with a stream error. So each rank seals its contribution with a checksum.
//!
//! NCCL connects the ranks in the call that enqueues the first collective, and tries for about a minute to reach a dead
//! rank. So a separate thread makes that call, which nobody waits for after the deadline.

mod record;

use crate::backend::bootstrap::record::{VERDICT_BYTES, refusal, sealed, unsealed, verdict};
use crate::backend::detached;
use crate::backend::device::{Device, StreamMark};
use crate::backend::nccl::Communicator;
use crate::backend::quiescence::UnderWay;
use crate::error::{Code, Error, Formatter, Result};
use crate::model::ids::GroupRank;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Enough for the records of creating a group on eight ranks.
const LEAST_BUFFER_BYTES: usize = 64 << 10;

/// Exchanges among the ranks of a communicator.
pub struct Bootstrap {
    comm: Communicator,
    device: Arc<dyn Device>,
    timeout: Duration,
    pub formatter: Formatter,
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
    /// Exchanges over `comm`, with buffers on `device`; `formatter` phrases refusals for the other ranks.
    pub fn new(comm: Communicator, device: Arc<dyn Device>, timeout: Duration, formatter: Formatter) -> Self {
        Self {
            comm,
            device,
            timeout,
            formatter,
            buffer: Mutex::default(),
            exchanges: AtomicU64::new(0),
            waited: Mutex::default(),
            lost: OnceCell::new(),
        }
    }

    /// The error of an exchange that other ranks never joined, or in which one was lost. It may block its stream
    /// forever, so no other exchange can follow.
    pub fn lost(&self) -> Option<Error> {
        self.lost.get().cloned()
    }

    pub fn ranks(&self) -> usize {
        self.comm.ranks
    }

    pub fn rank(&self) -> GroupRank {
        self.comm.rank
    }

    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The payloads of all ranks, in rank order. Collective; `mine` has the same length everywhere.
    pub fn all_gather(&self, mine: &[u8], stream: Stream) -> Result<Vec<Vec<u8>>> {
        if mine.is_empty() {
            return Ok(vec![Vec::new(); self.ranks()]);
        }
        if let Some(lost) = self.lost() {
            return Err(lost);
        }
        // From here on the others wait for this rank's part: after an error no exchange can follow.
        self.gathered(mine, stream).map_err(|error| self.lost.get_or_init(|| error).clone())
    }

    /// The same; any error is final for the communicator.
    fn gathered(&self, mine: &[u8], stream: Stream) -> Result<Vec<Vec<u8>>> {
        let start = Instant::now();
        let mut kept = self.buffer.lock();
        let exchange = self.exchanges.fetch_add(1, Ordering::Relaxed) + 1;
        let sealed = sealed(exchange, mine);
        let total = sealed.len() * self.ranks();
        // A running exchange owns the buffer; after a failure the buffer is not reused.
        let buffer = self.enough(kept.take(), total + sealed.len())?;
        let gathered = buffer.data;
        let own = DevPtr(gathered.0 + total);
        self.device.upload(own, &sealed)?;
        let _under_way = self.device.begin();
        let waited = match self.enqueue(own, gathered, sealed.len(), stream)? {
            Some(exchange) => self.watch(|| exchange.has_run(stream)).inspect(|()| exchange.end()),
            None => Err(Waited::TooLong(self.missed(", which NCCL is still connecting"))),
        };
        let mut bytes = vec![0; total];
        let cause = match waited {
            // The other ranks have this rank's contribution, and go on.
            Ok(()) => self.device.download(&mut bytes, gathered).map(|()| None)?,
            Err(Waited::TooLong(error)) => return Err(error),
            Err(Waited::Broken(cause)) => {
                // The received bytes are only a hint, and the memory may be inaccessible.
                let _ = self.device.download(&mut bytes, gathered);
                Some(cause)
            }
        };
        let records = bytes.chunks_exact(sealed.len());
        let payloads: Vec<_> = records.map(|record| unsealed(exchange, record)).collect();
        if cause.is_some() || payloads.contains(&None) {
            return Err(self.gave_up(&self.missing(&payloads), start, cause));
        }
        *kept = Some(buffer);
        Ok(payloads.into_iter().flatten().map(<[u8]>::to_vec).collect())
    }

    /// Enqueues the all-gather of `bytes` at `own` to `gathered`. `None` if NCCL's call does not return before the
    /// deadline.
    fn enqueue(&self, own: DevPtr, gathered: DevPtr, bytes: usize, stream: Stream) -> Result<Option<Exchange>> {
        let comm = self.comm.clone();
        let device = Arc::clone(&self.device);
        // Created and recorded here: after the deadline such a call might wait for the exchange, if another thread
        // frees memory.
        let mut mark = device.new_mark()?;
        let call = move || -> Result<Exchange> {
            let _entered = device.enter()?;
            let under_way = device.begin();
            comm.all_gather(own, gathered, bytes, stream)?;
            let mut exchange =
                Exchange { device: Arc::clone(&device), mark: None, is_over: false, _under_way: under_way };
            if mark.record(stream)? {
                exchange.mark = Some(mark);
            }
            Ok(exchange)
        };
        if stream == Stream::PER_THREAD {
            // In another thread this would name another stream.
            return call().map(Some);
        }
        self.within_deadline(|left| detached::within(left, call))?.transpose()
    }

    /// The other ranks whose payloads did not arrive.
    fn missing(&self, payloads: &[Option<&[u8]>]) -> Vec<GroupRank> {
        let ranks = GroupRank::all(payloads.len()).zip(payloads);
        ranks.filter(|&(rank, payload)| payload.is_none() && rank != self.rank()).map(|(rank, _)| rank).collect()
    }

    /// The error for an exchange that NCCL ended without `missing`; `cause` is the stream's error.
    fn gave_up(&self, missing: &[GroupRank], start: Instant, cause: Option<Error>) -> Error {
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
                    self.device.free_own(old.data, old.bytes);
                }
                let bytes = bytes.max(LEAST_BUFFER_BYTES);
                Ok(Buffer { data: self.device.alloc_own(bytes)?, bytes })
            }
        }
    }

    /// Exchanges payloads of `bytes` bytes if no rank refuses; otherwise all ranks fail, each naming the first that
    /// refused.
    pub fn agree(&self, mine: Result<Vec<u8>>, bytes: usize, stream: Stream) -> Result<Vec<Vec<u8>>> {
        let record = verdict(&mine, bytes, self.formatter);
        let mut records = match (mine, self.all_gather(&record, stream)) {
            (Ok(_), gathered) => gathered?,
            (Err(mine), Ok(_)) => return Err(mine),
            (Err(mine), Err(lost)) if mine == lost => return Err(lost),
            // The caller needs both errors: what to fix, and that the communicator is unusable.
            (Err(mine), Err(lost)) => return Err(mine.and(lost)),
        };
        for (rank, record) in records.iter().enumerate() {
            if let Some(text) = refusal(record) {
                return Err(Error::new(Code::RemoteError, format!("rank {rank} refused: {text}")));
            }
        }
        for record in &mut records {
            record.drain(..VERDICT_BYTES);
        }
        Ok(records)
    }

    /// Starts a new call, with the full deadline.
    pub fn begin_call(&self) {
        *self.waited.lock() = Duration::ZERO;
    }

    /// Runs `wait` as part of the call; its argument is the time that is left.
    fn within_deadline<T>(&self, wait: impl FnOnce(Duration) -> T) -> T {
        let start = Instant::now();
        let left = self.timeout.saturating_sub(*self.waited.lock());
        let waited = wait(left);
        *self.waited.lock() += start.elapsed();
        waited
    }

    /// Runs `wait` as part of the call, with only part of the remaining time, so that ranks can still tell each other
    /// before the deadline why it failed.
    pub fn within_most<T>(&self, wait: impl FnOnce(Duration) -> T) -> T {
        self.within_deadline(|left| wait(left * 3 / 4))
    }

    fn watch(&self, is_over: impl Fn() -> Result<bool>) -> std::result::Result<(), Waited> {
        self.within_deadline(|left| {
            let start = Instant::now();
            let mut pause = Duration::from_micros(10);
            while !is_over().map_err(Waited::Broken)? {
                if start.elapsed() > left {
                    return Err(Waited::TooLong(self.missed("")));
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
            Ok(())
        })
    }

    fn missed(&self, state: &str) -> Error {
        Error::new(
            Code::RemoteError,
            format!(
                "rank {} of {} waited {} ms for the other ranks in an exchange of all ranks{state}",
                self.rank(),
                self.ranks(),
                self.timeout.as_millis()
            ),
        )
    }
}

/// An exchange on a stream. Unless it was seen to end, dropping it marks it hung; after the deadline the thread that
/// enqueued it may be the one to do so.
struct Exchange {
    device: Arc<dyn Device>,
    /// Recorded behind the exchange; without one its end cannot be known.
    mark: Option<Box<dyn StreamMark>>,
    is_over: bool,
    /// Dropped after the exchange is marked hung: in between the device would seem quiescent.
    _under_way: UnderWay,
}

impl Exchange {
    /// Whether it has run; without a mark, whether everything on `stream` has.
    fn has_run(&self, stream: Stream) -> Result<bool> {
        self.mark.as_ref().map_or_else(|| self.device.is_idle(stream), |mark| mark.is_over())
    }

    fn end(mut self) {
        self.is_over = true;
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if !self.is_over {
            self.device.mark_hung(self.mark.take());
        }
    }
}

/// Why a wait for a stream failed.
enum Waited {
    /// The deadline passed while work still ran.
    TooLong(Error),
    /// The stream has an error.
    Broken(Error),
}

/// Ranks as text; an empty list stands for unknown ranks.
fn named(ranks: &[GroupRank]) -> String {
    match ranks {
        [] => "another rank".to_owned(),
        [rank] => format!("rank {rank}"),
        ranks => {
            let names: Vec<String> = ranks.iter().map(GroupRank::to_string).collect();
            format!("ranks {}", names.join(", "))
        }
    }
}

impl Drop for Bootstrap {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.lock().take() {
            self.device.free_own(buffer.data, buffer.bytes);
        }
    }
}

//! Small exchanges over the caller's communicator, while groups and handles are created.
//!
//! Only ncclAllGather is used, so every NCCL serves. Each wait has the group's deadline: a rank that
//! never arrives makes the others return an error.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::nccl::Communicator;
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the verdict that each rank puts in front of its payload: a code, then text.
const VERDICT_BYTES: usize = 512;
const CODE_BYTES: usize = 4;

/// The ranks of a communicator, for exchanges among them.
pub struct Bootstrap {
    comm: Communicator,
    memory: Arc<dyn DeviceMemory>,
    timeout: Duration,
}

impl Bootstrap {
    /// Exchanges over `comm`, through buffers in `memory`.
    pub fn new(comm: Communicator, memory: Arc<dyn DeviceMemory>, timeout: Duration) -> Self {
        Self {
            comm,
            memory,
            timeout,
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.comm.ranks
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.comm.rank
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
        let total = mine.len() * self.ranks();
        let buffer = self.memory.alloc(mine.len() + total)?;
        let gathered = DevPtr(buffer.0 + total);
        self.memory.upload(gathered, mine)?;
        self.comm.all_gather(gathered, buffer, mine.len(), stream)?;
        // After a deadline the buffer is left alone: the exchange may still write to it.
        self.wait(stream)?;
        let mut bytes = vec![0; total];
        self.memory.download(&mut bytes, buffer)?;
        self.memory.free(buffer)?;
        Ok(bytes.chunks_exact(mine.len()).map(<[u8]>::to_vec).collect())
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
                copy_prefix(&mut record, CODE_BYTES, clip(error.text()).as_bytes());
            }
        }
        let mut records = self.all_gather(&record, stream)?;
        mine?;
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

    /// Waits until everything enqueued on `stream` has run.
    pub fn wait(&self, stream: Stream) -> Result<()> {
        let start = Instant::now();
        let mut pause = Duration::from_micros(10);
        while !self.memory.is_idle(stream)? {
            if start.elapsed() > self.timeout {
                return Err(Error::new(
                    Code::RemoteError,
                    format!(
                        "rank {} of {} waited {} ms for the other ranks in a collective creation",
                        self.rank(),
                        self.ranks(),
                        self.timeout.as_millis()
                    ),
                ));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// The text of a refusing rank's record; `None` if that rank is well.
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
    fn long_texts_are_cut_between_characters() {
        let text = "é".repeat(VERDICT_BYTES);
        assert!(clip(&text).len() <= VERDICT_BYTES - CODE_BYTES);
        assert_eq!(clip("short"), "short");
    }
}

//! Launch shapes that `nccl_ep.tune` measured on this machine, from the file `NCCL_EP_TUNING_FILE`.
//!
//! A file that cannot be read, has another version, or was measured on another GPU or with another
//! number of ranks is ignored with a warning: the library's own choices work everywhere.
#![forbid(unsafe_code)]

mod file;
mod source;

use crate::log::{self, shown};
use file::{Entry, File};

/// Token counts are tuned at powers of two, up to 2^23.
const SIZES: usize = 24;

/// An operation with a launch shape of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // As they are called.
pub enum Operation {
    LlDispatch,
    LlCombine,
    HtDispatch,
    HtCombine,
}

impl Operation {
    const ALL: [Self; 4] = [
        Self::LlDispatch,
        Self::LlCombine,
        Self::HtDispatch,
        Self::HtCombine,
    ];

    /// The name in the file.
    fn name(self) -> &'static str {
        match self {
            Self::LlDispatch => "ll_dispatch",
            Self::LlCombine => "ll_combine",
            Self::HtDispatch => "ht_dispatch",
            Self::HtCombine => "ht_combine",
        }
    }
}

/// A launch shape: `send_blocks` of `blocks` send; with both equal every block does everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that send.
    pub send_blocks: u32,
}

impl Choice {
    /// The same with at most `blocks`, of which the same share sends.
    pub fn at_most(self, blocks: u32) -> Self {
        if self.blocks <= blocks {
            return self;
        }
        Self {
            blocks,
            send_blocks: share(blocks, self.send_blocks, self.blocks).clamp(1, blocks.max(1)),
            ..self
        }
    }
}

/// The share of `blocks` that `part` is of `whole`, rounded down.
pub fn share(blocks: u32, part: u32, whole: u32) -> u32 {
    let share = u64::from(blocks) * u64::from(part) / u64::from(whole.max(1));
    u32::try_from(share).unwrap_or(blocks)
}

/// What was measured for one operation and one number of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Measured {
    /// Nothing; the next larger number of tokens decides.
    #[default]
    Nothing,
    /// The library's own choice was best.
    Own,
    /// Another choice was best.
    Other(Choice),
}

/// A group's launch shapes that differ from the library's own choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    measured: [[Measured; SIZES]; Operation::ALL.len()],
}

impl Tuning {
    /// Reads the file at `path` for a group of `ranks` on the GPU `gpu` with this many `multiprocessors`.
    pub fn for_group(path: &str, gpu: &str, ranks: usize, multiprocessors: u32) -> Self {
        source::read(path)
            .and_then(|text| Self::parse(&text, gpu, ranks, multiprocessors))
            .unwrap_or_else(|reason| {
                let path = shown(path);
                log::warn(&format!("NCCL_EP_TUNING_FILE {path} is ignored: {reason}"));
                Self::default()
            })
    }

    /// Parses `text`, the contents of a file; an error is the reason to ignore it.
    pub fn parse(
        text: &str,
        gpu: &str,
        ranks: usize,
        multiprocessors: u32,
    ) -> Result<Self, String> {
        let file = File::parse(text)?;
        if file.gpu != gpu {
            let other = shown(&file.gpu);
            return Err(format!("it is for {other}, and this is {gpu}"));
        }
        if file.ranks != ranks as u64 {
            return Err(format!(
                "it is for {} ranks, and these are {ranks}",
                file.ranks
            ));
        }
        let mut tuning = Self::default();
        for entry in &file.entries {
            let (operation, size, measured) = checked(entry, multiprocessors)?;
            if let Some(entry) = tuning.measured[operation as usize].get_mut(size) {
                *entry = measured;
            }
        }
        Ok(tuning)
    }

    /// Whether the library's own choices apply to everything.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The shape of an operation on `tokens`: the entry for that number, else for the next larger
    /// one that was measured. `None` is the library's own choice; it also applies beyond the
    /// largest entry.
    pub fn choice(&self, operation: Operation, tokens: usize) -> Option<Choice> {
        let first = tokens.max(1).next_power_of_two().trailing_zeros() as usize;
        let sizes = self.measured[operation as usize].get(first..)?;
        match sizes.iter().find(|&&size| size != Measured::Nothing)? {
            Measured::Other(choice) => Some(*choice),
            _ => None,
        }
    }
}

/// An entry as operation, index of its token count, and result; or the reason it is invalid.
fn checked(entry: &Entry, multiprocessors: u32) -> Result<(Operation, usize, Measured), String> {
    const WARP: u64 = 32;
    const MOST_THREADS: u64 = 1024;
    let wrong = |what: &str| Err(format!("entry {}: {what}", entry.number));
    let Some(operation) = Operation::ALL
        .into_iter()
        .find(|operation| operation.name() == entry.operation)
    else {
        let operation = shown(&entry.operation);
        return wrong(&format!("unknown operation {operation:?}"));
    };
    if !entry.tokens.is_power_of_two() || entry.tokens >= 1 << SIZES {
        return wrong("tokens must be a power of two below 2^24");
    }
    let size = entry.tokens.trailing_zeros() as usize;
    let Some(shape) = &entry.shape else {
        return Ok((operation, size, Measured::Own));
    };
    if shape.blocks == 0 || shape.blocks > u64::from(multiprocessors) {
        return wrong(&format!("blocks must be 1 to {multiprocessors}"));
    }
    if shape.send_blocks == 0 || shape.send_blocks > shape.blocks {
        return wrong("send_blocks must be 1 to blocks");
    }
    if shape.threads == 0 || !shape.threads.is_multiple_of(WARP) || shape.threads > MOST_THREADS {
        return wrong("threads must be a multiple of 32 up to 1024");
    }
    let choice = Choice {
        blocks: shape.blocks as u32,
        threads: shape.threads as u32,
        send_blocks: shape.send_blocks as u32,
    };
    Ok((operation, size, Measured::Other(choice)))
}

#[cfg(test)]
mod tests;

//! A group's launch shapes that differ from the library's own choices: measured on this machine by `nccl_ep.tune` and
//! read from `NCCL_EP_TUNING_FILE`, or set while the group is open; from that file also variants and shapes under
//! conditions.
//!
//! They are local: ranks need not launch the same. A file that cannot be read, has another version, or was measured on
//! another GPU or number of ranks is ignored with a warning: the library's own choices work everywhere.

mod file;
mod learned;
mod variant;

use crate::log::{self, shown};
use file::File;
pub use learned::{Best, Learned, Lie, Rows};
pub use variant::{Choice, Operation, Unfit, Variant, share};

/// Token counts are tuned at powers of two, up to 2^23.
const SIZES: usize = 24;

/// What was measured for one operation and one number of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Measured {
    /// Nothing: the next larger number of tokens decides.
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
    /// From a file that is read again for each handle.
    pub live: bool,
}

/// The file with a group's launch shapes.
#[derive(Clone, Debug)]
pub struct TuningFile {
    pub path: String,
    pub gpu: String,
    pub ranks: usize,
    pub multiprocessors: u32,
}

impl TuningFile {
    /// The launch shapes in it now; none if it is not for this GPU and group.
    pub fn read(&self) -> Option<Tuning> {
        file::read(&self.path)
            .and_then(|text| Tuning::parse(&text, &self.gpu, self.ranks, self.multiprocessors))
            .inspect_err(|reason| warn_of(&self.path, reason))
            .ok()
    }
}

impl Learned {
    /// What the file at `path` says for this device and group. Silent about unusable files: where kernels are launched,
    /// the reader of their shapes has warned.
    pub fn read(path: &str, gpu: &str, ranks: usize, multiprocessors: Option<u32>) -> Self {
        let found = file::read(path).and_then(|text| {
            let most = multiprocessors.unwrap_or(u32::MAX);
            Tuning::parse_all(&text, gpu, ranks, most).map(|(_, learned)| learned)
        });
        let warn = |reason: &String| warn_of(path, reason);
        if multiprocessors.is_none() { found.inspect_err(warn) } else { found }.unwrap_or_default()
    }
}

fn warn_of(path: &str, reason: &str) {
    let path = shown(path);
    log::warn(&format!("NCCL_EP_TUNING_FILE {path} is ignored: {reason}"));
}

impl Tuning {
    /// Parses `text`, the contents of a file; an error is the reason to ignore it.
    pub fn parse(text: &str, gpu: &str, ranks: usize, multiprocessors: u32) -> Result<Self, String> {
        Self::parse_all(text, gpu, ranks, multiprocessors).map(|(tuning, _)| tuning)
    }

    fn parse_all(text: &str, gpu: &str, ranks: usize, multiprocessors: u32) -> Result<(Self, Learned), String> {
        let file = fitting(File::parse(text)?, gpu, ranks)?;
        let learned = Learned::parse(&file.choices)?;
        let mut tuning = Self { live: file.live, ..Self::default() };
        for entry in &file.entries {
            let wrong = |what: String| format!("entry {}: {what}", entry.number);
            let operation = Operation::of_file(&entry.operation).map_err(wrong)?;
            tuning.set(operation, entry.tokens, entry.shape, multiprocessors).map_err(wrong)?;
        }
        Ok((tuning, learned))
    }

    /// Sets the shape of `operation` for `tokens` on a GPU with this many `multiprocessors`; `None` is the library's
    /// own choice.
    fn set(
        &mut self,
        operation: Operation,
        tokens: u64,
        shape: Option<Choice>,
        multiprocessors: u32,
    ) -> Result<(), String> {
        let sizes = &mut self.measured[operation as usize];
        let size = tokens.is_power_of_two().then(|| tokens.trailing_zeros());
        let Some(entry) = size.and_then(|size| sizes.get_mut(size as usize)) else {
            return Err("tokens must be a power of two below 2^24".to_owned());
        };
        *entry = match shape {
            None => Measured::Own,
            Some(shape) => Measured::Other(shape.fitting(multiprocessors).map_err(|unfit| unfit.to_string())?),
        };
        Ok(())
    }

    /// Whether the library's own choices apply to everything.
    pub fn is_empty(&self) -> bool {
        self.measured == Self::default().measured
    }

    /// The shape for `tokens`: that of the next larger measured number of tokens. `None`, also beyond the largest
    /// entry, is the library's own choice.
    pub fn choice(&self, operation: Operation, tokens: usize) -> Option<Choice> {
        let first = tokens.max(1).next_power_of_two().trailing_zeros() as usize;
        match self.measured[operation as usize].get(first..)?.iter().find(|&&size| size != Measured::Nothing)? {
            Measured::Other(choice) => Some(*choice),
            _ => None,
        }
    }
}

/// The one of `files` that was measured on such a machine.
fn fitting(mut files: Vec<File>, gpu: &str, ranks: usize) -> Result<File, String> {
    let fits = |file: &File| file.gpu == gpu && file.ranks == ranks as u64;
    if let Some(index) = files.iter().position(fits) {
        return Ok(files.swap_remove(index));
    }
    Err(match &files[..] {
        [file] if file.gpu != gpu => format!("it is for {}, and this is {gpu}", shown(&file.gpu)),
        [file] => format!("it is for {} ranks, and these are {ranks}", file.ranks),
        files => format!("none of its {} parts is for {ranks} ranks on {gpu}", files.len()),
    })
}

#[cfg(test)]
mod tests;

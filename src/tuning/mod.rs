//! What `nccl_ep.tune` has measured on this machine, from `NCCL_EP_TUNING_FILE`: launch shapes of plain rows, and
//! choices of variants and shapes under conditions.
//!
//! Both are local: ranks need not launch the same. A file that cannot be read, has another version, or was measured on
//! another GPU or number of ranks is ignored with a warning: the library's own choices work everywhere.

mod file;
mod learned;
mod shapes;
mod variant;

use crate::log::{self, shown};
use file::File;
pub use learned::{Best, Learned, RowLayout, Rows};
pub use shapes::Shapes;
pub use variant::{Choice, Operation, Unfit, Variant, share};

/// What a file says for a device and a number of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    pub shapes: Shapes,
    pub choices: Learned,
}

impl Tuning {
    /// What the file at `path` says for groups of `ranks` on the `gpu`, which has as many `multiprocessors`, if any.
    pub fn read(path: &str, gpu: Result<String, String>, ranks: usize, multiprocessors: Option<u32>) -> Self {
        let most = multiprocessors.unwrap_or(u32::MAX);
        let found = gpu.and_then(|gpu| Self::parse(&file::read(path)?, &gpu, ranks, most));
        let ignored = |reason: &String| {
            let path = shown(path);
            log::warn(&format!("NCCL_EP_TUNING_FILE {path} is ignored: {reason}"));
        };
        found.inspect_err(ignored).unwrap_or_default()
    }

    /// Parses `text`, the contents of a file; an error is the reason to ignore it.
    pub fn parse(text: &str, gpu: &str, ranks: usize, multiprocessors: u32) -> Result<Self, String> {
        let file = fitting(File::parse(text)?, gpu, ranks)?;
        let choices = Learned::parse(&file.choices)?;
        Ok(Self { shapes: Shapes::parse(&file.entries, multiprocessors)?, choices })
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

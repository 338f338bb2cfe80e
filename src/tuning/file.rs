//! The JSON that `nccl_ep.tune` writes, read from a path in the environment, which may be anything, as plain data;
//! docs/python.md describes it.

use super::variant::Choice;
use serde_json::Value;
use std::fs::{self, Metadata};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// Far more than `nccl_ep.tune` writes.
const MOST_BYTES: u64 = 1 << 20;

/// The contents of the file at `path`, or the reason not to read it.
pub fn read(path: &str) -> Result<String, String> {
    let failed = |error: std::io::Error| error.to_string();
    // Checked before opening: opening a device or a pipe may have effects or block.
    check(&fs::metadata(path).map_err(failed)?)?;
    let mut options = fs::File::options();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = file.open(path).map_err(failed)?;
    check(&file.metadata().map_err(failed)?)?;
    let mut text = String::new();
    // The file may grow while it is read.
    let mut file = file.take(MOST_BYTES);
    file.read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

fn check(file: &Metadata) -> Result<(), String> {
    if !file.is_file() {
        return Err("it is not a regular file".to_owned());
    }
    if file.len() > MOST_BYTES {
        let bytes = file.len();
        return Err(format!("it has {bytes} bytes, and {MOST_BYTES} are the most"));
    }
    Ok(())
}

const FORMAT: &str = "nccl_ep tuning";
const VERSION: u64 = 1;

/// A file of a known version, or its part for one GPU and number of ranks; its lists are not parsed yet.
#[derive(Debug, PartialEq, Eq)]
pub struct File {
    /// The GPU's name, as the driver reports it.
    pub gpu: String,
    pub ranks: u64,
    /// The measured launch shapes.
    pub entries: Vec<Value>,
    /// The choices under conditions.
    pub choices: Vec<Value>,
}

impl File {
    /// Parses `text`, which may combine several files. Unknown fields are ignored.
    pub fn parse(text: &str) -> Result<Vec<Self>, String> {
        let root: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if string(&root, "format")? != FORMAT {
            return Err(format!("its format is not {FORMAT:?}"));
        }
        let version = number(&root, "version")?;
        if version != VERSION {
            return Err(format!("it has version {version}, and we know {VERSION}"));
        }
        match root.get("files").and_then(Value::as_array) {
            None => Ok(vec![Self::of(&root)?]),
            Some(files) => files.iter().map(Self::of).collect(),
        }
    }

    fn of(root: &Value) -> Result<Self, String> {
        let list = |name| root.get(name).map(|list| list.as_array().cloned());
        Ok(Self {
            gpu: string(root, "gpu")?,
            ranks: number(root, "ranks")?,
            entries: list("entries").flatten().ok_or("it has no list of entries")?,
            choices: list("choices").map_or(Ok(Vec::new()), |list| list.ok_or("its choices are no list"))?,
        })
    }
}

/// The launch shape in an entry, not checked yet.
pub fn shape(entry: &Value) -> Result<Choice, String> {
    // A number that does not fit is too large for any GPU, too.
    let read = |name| number(entry, name).map(|it| u32::try_from(it).unwrap_or(u32::MAX));
    Ok(Choice { blocks: read("blocks")?, threads: read("threads")?, send_blocks: read("send_blocks")? })
}

/// The string field `name` of an object.
pub fn string(value: &Value, name: &str) -> Result<String, String> {
    let found = value.get(name).and_then(Value::as_str);
    found.map(str::to_owned).ok_or_else(|| format!("{name:?} is missing or no text"))
}

/// The number field `name` of an object.
pub fn number(value: &Value, name: &str) -> Result<u64, String> {
    let found = value.get(name).and_then(Value::as_u64);
    found.ok_or_else(|| format!("{name:?} is missing or no natural number"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::process::Command;

    /// A path of its own for a test; its file is removed with it.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let name = format!("nccl_ep-{}-{name}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        fn path(&self) -> &str {
            self.0.to_str().unwrap()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn regular_files_are_read() {
        let file = Scratch::new("regular");
        std::fs::write(file.path(), "text").unwrap();
        assert_eq!(read(file.path()).unwrap(), "text");
        std::fs::write(file.path(), [0xff]).unwrap();
        assert!(read(file.path()).is_err());
        assert!(read("/nowhere/at/all").unwrap_err().contains("No such file"));
    }

    #[test]
    fn other_files_are_not_even_opened() {
        let fifo = Scratch::new("fifo");
        assert!(Command::new("mkfifo").arg(fifo.path()).status().unwrap().success());
        for path in [fifo.path(), "/dev/zero", "/"] {
            assert_eq!(read(path).unwrap_err(), "it is not a regular file");
        }
    }

    #[test]
    fn long_files_are_not_read() {
        let file = Scratch::new("long");
        let long = fs::File::create(file.path()).unwrap();
        long.set_len(MOST_BYTES).unwrap();
        assert_eq!(read(file.path()).unwrap().len() as u64, MOST_BYTES);
        long.set_len(1 << 30).unwrap();
        let reason = read(file.path()).unwrap_err();
        assert_eq!(reason, "it has 1073741824 bytes, and 1048576 are the most");
    }
}

//! Reads a tuning file from a path in the environment, which may be anything.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;

/// Far more than `nccl_ep.tune` writes.
const MOST_BYTES: u64 = 1 << 20;

/// The contents of the file at `path`, or the reason not to read it.
pub fn read(path: &str) -> Result<String, String> {
    let failed = |error: std::io::Error| error.to_string();
    // Checked before opening: opening a device or a pipe may have effects or block.
    check(&std::fs::metadata(path).map_err(failed)?)?;
    let mut options = File::options();
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
        let long = File::create(file.path()).unwrap();
        long.set_len(MOST_BYTES).unwrap();
        assert_eq!(read(file.path()).unwrap().len() as u64, MOST_BYTES);
        long.set_len(1 << 30).unwrap();
        let reason = read(file.path()).unwrap_err();
        assert_eq!(reason, "it has 1073741824 bytes, and 1048576 are the most");
    }
}

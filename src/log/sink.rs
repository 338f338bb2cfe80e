//! Where lines go, and the names in their prefix.
#![allow(unsafe_code)]

use once_cell::sync::OnceCell;
use std::fs::File;
use std::io::Write;
use std::os::fd::FromRawFd;
use std::os::unix::fs::MetadataExt;

/// stderr or a file, opened by the first line.
pub(super) struct Sink {
    /// The value of `NCCL_DEBUG_FILE`.
    pattern: Option<String>,
    file: OnceCell<Option<File>>,
}

impl Sink {
    pub(super) fn new(pattern: Option<String>) -> Self {
        Self { pattern, file: OnceCell::new() }
    }

    /// Writes one line with a single call, so that lines of several threads do not interleave.
    pub(super) fn line(&self, text: &str) {
        let line = format!("{text}\n");
        // A failure to log must not fail the call, nor panic as `eprintln!` does.
        let _ = match self.file.get_or_init(|| self.open()) {
            Some(file) => (&*file).write_all(line.as_bytes()),
            None => std::io::stderr().write_all(line.as_bytes()),
        };
    }

    fn open(&self) -> Option<File> {
        let path = expand(self.pattern.as_ref()?, &host_name(), std::process::id());
        opened_by_process(&path).or_else(|| {
            let mut options = File::options();
            options.create(true).append(true).open(&path).ok()
        })
    }
}

/// `pattern` with `%h` as the host name, `%p` as the process id and `%%` as `%`.
fn expand(pattern: &str, host: &str, process: u32) -> String {
    let mut path = String::new();
    let mut rest = pattern.chars();
    while let Some(letter) = rest.next() {
        if letter != '%' {
            path.push(letter);
            continue;
        }
        match rest.next() {
            Some('h') => path.push_str(host),
            Some('p') => path.push_str(&process.to_string()),
            Some('%') => path.push('%'),
            other => path.extend(std::iter::once('%').chain(other)),
        }
    }
    path
}

/// This process's open descriptor for the file at `path`, duplicated: NCCL writes its own lines there, and with a
/// second open file, hence a second offset, each would overwrite the other's lines.
fn opened_by_process(path: &str) -> Option<File> {
    let wanted = std::fs::metadata(path).ok()?;
    std::fs::read_dir("/proc/self/fd").ok()?.flatten().find_map(|entry| {
        let number: i32 = entry.file_name().to_str()?.parse().ok()?;
        let file = std::fs::metadata(entry.path()).ok()?;
        if (file.dev(), file.ino()) != (wanted.dev(), wanted.ino()) {
            return None;
        }
        // SAFETY: takes numbers only; fails if the descriptor is closed by now.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFL) };
        if flags < 0 || flags & libc::O_ACCMODE == libc::O_RDONLY {
            return None;
        }
        // SAFETY: as above.
        let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
        // SAFETY: a fresh descriptor that nobody else owns.
        (copy >= 0).then(|| unsafe { File::from_raw_fd(copy) })
    })
}

/// The host's name up to its first dot, as NCCL writes it.
pub(super) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim().split('.').next().unwrap_or_default();
    if name.is_empty() { "unknown" } else { name }.to_owned()
}

/// The kernel's id of the calling thread; 0 if unknown.
pub(super) fn thread_number() -> u32 {
    let task = std::fs::read_link("/proc/thread-self").ok();
    task.and_then(|path| path.file_name()?.to_str()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_expanded() {
        let expanded = |pattern| expand(pattern, "node1", 17);
        assert_eq!(expanded("/logs/%h.%p.txt"), "/logs/node1.17.txt");
        assert_eq!(expanded("100%%-%x-%"), "100%-%x-%");
    }

    #[test]
    fn names_are_known() {
        assert!(!host_name().is_empty() && !host_name().contains('.'));
        assert!(thread_number() > 0);
    }

    /// Lines follow those of another writer in this process that has the file open, and do not overwrite them.
    #[test]
    fn a_file_that_is_open_is_shared() {
        let name = format!("nccl_ep-{}-log", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut other = File::create(&path).unwrap();
        other.write_all(b"one\n").unwrap();
        let sink = Sink::new(path.to_str().map(str::to_owned));
        sink.line("two");
        other.write_all(b"three\n").unwrap();
        drop(other);
        Sink::new(path.to_str().map(str::to_owned)).line("four");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text, "one\ntwo\nthree\nfour\n");
    }

    #[test]
    fn what_cannot_be_opened_is_no_failure() {
        Sink::new(Some("/nowhere/at/all".to_owned())).line("a line of a test");
    }
}

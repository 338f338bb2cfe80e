//! The lines that `NCCL_DEBUG` (refusals, new groups) and `NCCL_EP_CHECK` ask for, on stderr or in the file that
//! `NCCL_DEBUG_FILE` names.
//!
//! No logging crate: nobody could install its subscriber in a C library, or it would interfere with the host program's.

mod sink;

use crate::env::{Env, Unused, Verbosity, Why};
use once_cell::sync::{Lazy, OnceCell};
use parking_lot::Mutex;
use sink::Sink;
use std::fmt::Display;

/// Most characters of external text in a message.
const SHOWN: usize = 80;

struct Log {
    verbosity: Verbosity,
    sink: Sink,
}

static LOG: Lazy<Log> = Lazy::new(|| {
    let env = Env::read();
    Log {
        verbosity: env.verbosity,
        // As in NCCL, which does not write its version to a file unless more is to follow.
        sink: Sink::new(env.debug_file.filter(|_| env.verbosity > Verbosity::Version)),
    }
});

/// Prints `text` as a warning, if `NCCL_DEBUG` is `WARN` or more verbose.
pub fn warn(text: &str) {
    if LOG.verbosity >= Verbosity::Warnings {
        LOG.sink.line(&format!("{} NCCL_EP WARN {text}", here()));
    }
}

/// Warns once per process of a variable that is set without effect.
pub fn in_vain(variable: &Unused) {
    static WARNED: Mutex<Vec<Unused>> = Mutex::new(Vec::new());
    let mut warned = WARNED.lock();
    if warned.contains(variable) {
        return;
    }
    warned.push(variable.clone());
    let hint = match variable.why {
        Why::Value(allowed) => format!("allowed: {allowed}"),
        Why::Name(None) => "no variable has this name".to_owned(),
        Why::Name(Some(meant)) => format!("no variable has this name, but {meant} may be meant"),
    };
    let (name, value) = (shown(&variable.name), shown(&variable.value));
    warn(&format!("{name}={value} is ignored; {hint}"));
}

/// Prints a finding of a check, whatever `NCCL_DEBUG` says: checks have a variable of their own.
pub fn check(text: &str) {
    LOG.sink.line(&format!("{} NCCL_EP WARN {text}", here()));
}

/// Whether [`group`] prints.
pub fn tells_of_groups() -> bool {
    LOG.verbosity >= Verbosity::Groups
}

/// Prints `text` about a group on `device` in NCCL's form, if `NCCL_DEBUG` is `INFO` or more verbose.
pub fn group(device: usize, text: &dyn Display) {
    if tells_of_groups() {
        LOG.sink.line(&format!("{} [{device}] NCCL_EP INFO {text}", here()));
    }
}

/// Host, process and thread: the prefix of NCCL's lines.
fn here() -> String {
    let (host, process) = (sink::host_name(), std::process::id());
    format!("{host}:{process}:{}", sink::thread_number())
}

/// Prints `text`, once per process, if `NCCL_DEBUG` is `VERSION`.
pub fn version(text: &str) {
    static PRINTED: OnceCell<()> = OnceCell::new();
    if LOG.verbosity == Verbosity::Version {
        PRINTED.get_or_init(|| LOG.sink.line(text));
    }
}

/// External `text` for a message: truncated, and without control characters that a terminal might obey.
pub fn shown(text: &str) -> String {
    let is_plain = |c: &char| c.is_ascii_graphic() || *c == ' ' || c.is_alphanumeric();
    let mut line: String = text.chars().map(|c| Some(c).filter(is_plain).unwrap_or('?')).take(SHOWN).collect();
    if text.chars().nth(SHOWN).is_some() {
        line.push_str("...");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_and_cleaned() {
        assert_eq!(shown("NVIDIA H200 (größer)"), "NVIDIA H200 (größer)");
        assert_eq!(shown("\x1b[31m\r\n\u{202e}x\u{9b}"), "?[31m???x?");
        let long = shown(&"ä".repeat(5 << 20));
        assert_eq!(long.chars().count(), SHOWN + 3);
        assert!(long.ends_with("ä..."));
    }
}

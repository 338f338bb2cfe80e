//! The lines that `NCCL_DEBUG` asks for, refusals and one for each new group, and those of `NCCL_EP_CHECK`. They go to stderr, or
//! to the file that `NCCL_DEBUG_FILE` names.
//!
//! No logging crate: in a C library nobody could install its subscriber, or it would interfere with
//! somebody else's.

mod sink;

use crate::env::{Env, Verbosity};
use once_cell::sync::{Lazy, OnceCell};
use sink::Sink;
use std::fmt::Display;

struct Log {
    verbosity: Verbosity,
    sink: Sink,
}

static LOG: Lazy<Log> = Lazy::new(|| {
    let env = Env::read();
    Log {
        verbosity: env.verbosity,
        // As NCCL, which writes its version to no file unless there is more to come.
        sink: Sink::new(
            env.debug_file
                .filter(|_| env.verbosity > Verbosity::Version),
        ),
    }
});

/// Prints `text` as a warning, if `NCCL_DEBUG` is `WARN` or more verbose.
pub fn warn(text: &str) {
    if LOG.verbosity >= Verbosity::Warnings {
        LOG.sink.line(&format!("{} NCCL_EP WARN {text}", here()));
    }
}

/// Prints what a check has found, which was asked for by a variable of its own.
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
        LOG.sink
            .line(&format!("{} [{device}] NCCL_EP INFO {text}", here()));
    }
}

/// Host, process and thread, as NCCL's lines begin.
fn here() -> String {
    let (host, process) = (sink::host_name(), std::process::id());
    format!("{host}:{process}:{}", sink::thread_number())
}

/// Prints `text`, once in the process, if `NCCL_DEBUG` is `VERSION`.
pub fn version(text: &str) {
    static PRINTED: OnceCell<()> = OnceCell::new();
    if LOG.verbosity == Verbosity::Version {
        PRINTED.get_or_init(|| LOG.sink.line(text));
    }
}

//! The one line on stderr that a refusal prints when `NCCL_DEBUG` asks for it.
//!
//! No logging crate: in a C library nobody could install its subscriber, or it would interfere with
//! somebody else's.
#![forbid(unsafe_code)]

use crate::env::Env;
use once_cell::sync::Lazy;
use std::io::Write;

static WARN: Lazy<bool> = Lazy::new(|| Env::read().warn);

/// Prints `text` as a warning in NCCL's format, if `NCCL_DEBUG` is `WARN` or more verbose.
pub fn warn(text: &str) {
    if *WARN {
        // A failing stderr is no reason to fail, or to panic as eprintln! does.
        let _ = writeln!(
            std::io::stderr(),
            "[{}] NCCL_EP WARN {text}",
            std::process::id()
        );
    }
}

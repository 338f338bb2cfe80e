//! The one line on stderr that a refusal prints when `NCCL_DEBUG` asks for it.
//!
//! No logging crate: in a C library nobody could install its subscriber, or it would meddle with
//! somebody else's.
#![forbid(unsafe_code)]

use crate::env::Env;
use once_cell::sync::Lazy;

static WARN: Lazy<bool> = Lazy::new(|| Env::read().warn);

/// Prints `text` as a warning in NCCL's manner, if `NCCL_DEBUG` is `WARN` or more talkative.
pub fn warn(text: &str) {
    if *WARN {
        eprintln!("[{}] NCCL_EP WARN {text}", std::process::id());
    }
}

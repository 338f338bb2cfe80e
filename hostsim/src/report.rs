//! Messages on stderr.
//!
//! There are two kinds: failures that a person must see (a hang, corrupted memory) are always printed; refusals of a
//! call only if `NCCL_DEBUG` asks for warnings, as in NCCL.

use std::io::Write;
use std::sync::OnceLock;

/// Prints one line about a failure that the return code alone cannot explain.
pub(crate) fn failure(text: &str) {
    // One write call per line keeps lines of several processes whole; a closed stderr must not fail the caller.
    let line = format!("hostsim: {text}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Prints one line about a refused call, if `NCCL_DEBUG` is `WARN` or more verbose.
pub(crate) fn refusal(text: &str) {
    static WANTED: OnceLock<bool> = OnceLock::new();
    if *WANTED.get_or_init(|| wants_warnings(std::env::var("NCCL_DEBUG").ok().as_deref())) {
        failure(text);
    }
}

fn wants_warnings(level: Option<&str>) -> bool {
    level.is_some_and(|level| ["WARN", "INFO", "ABORT", "TRACE"].iter().any(|name| level.eq_ignore_ascii_case(name)))
}

#[cfg(test)]
mod tests {
    use super::wants_warnings;

    #[test]
    fn warnings_follow_nccl_debug() {
        assert!(wants_warnings(Some("WARN")));
        assert!(wants_warnings(Some("info")));
        assert!(!wants_warnings(Some("VERSION")));
        assert!(!wants_warnings(None));
    }
}

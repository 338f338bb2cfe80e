//! Every environment variable that the library reads, as one immutable struct.
//!
//! A group reads it once, when it is created; `log` once per process. `docs/env.md` lists the same
//! names; a test compares.
#![forbid(unsafe_code)]

use crate::model::group::{LlCombineMode, NodeSums};
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

/// Settings taken from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Env {
    /// `NCCL_EP_TIMEOUT_MS`: how long any wait for another rank may last. Default 100,000 ms.
    pub timeout: Duration,
    /// `NCCL_EP_LL_COMBINE`: how LL combines sum, `exact` or `reduce`. Default reduce.
    pub ll_combine: LlCombineMode,
    /// `NCCL_EP_NODE_SUMS`: how combines add the sums of nodes, `home` or `invariant`. Default
    /// home.
    pub node_sums: NodeSums,
    /// `NCCL_EP_TUNING_FILE`: launch shapes measured on this machine.
    pub tuning_file: Option<String>,
    /// `NCCL_EP_HT_CHUNK_BYTES`: bytes that an HT operation sends to other nodes at a time.
    pub ht_chunk_bytes: Option<usize>,
    /// `NCCL_EP_CHECK`: whether calls look at their ids and weights.
    pub check: bool,
    /// `NCCL_HOSTID`: replaces the machine's boot id when ranks are grouped into nodes.
    pub host_id: Option<String>,
    /// `NVTX_INJECTION64_PATH`: the library of a profiler that wants to hear of ranges.
    pub nvtx_injection: Option<String>,
    /// `NCCL_DEBUG`: what is printed.
    pub verbosity: Verbosity,
    /// `NCCL_DEBUG_FILE`: where to, instead of stderr; `%h` and `%p` are not replaced yet.
    pub debug_file: Option<String>,
}

/// What the library prints; each includes those before it, except that only `Version` prints the
/// version alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Nothing.
    Nothing,
    /// The version.
    Version,
    /// Refusals.
    Warnings,
    /// New groups.
    Groups,
}

impl Verbosity {
    /// What a value of `NCCL_DEBUG` asks for.
    fn of(level: &str) -> Self {
        match level.trim().to_uppercase().as_str() {
            "VERSION" => Self::Version,
            "WARN" => Self::Warnings,
            "INFO" | "ABORT" | "TRACE" => Self::Groups,
            _ => Self::Nothing,
        }
    }
}

impl Env {
    /// Reads the process environment.
    pub fn read() -> Self {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// Reads through `lookup`; invalid values count as unset.
    fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Self {
        let timeout_ms = lookup("NCCL_EP_TIMEOUT_MS")
            .and_then(|text| text.trim().parse::<u64>().ok())
            .filter(|&ms| ms > 0)
            .unwrap_or(100_000);
        Self {
            timeout: Duration::from_millis(timeout_ms),
            ll_combine: lookup("NCCL_EP_LL_COMBINE")
                .and_then(|name| {
                    LlCombineMode::ALL
                        .into_iter()
                        .find(|mode| mode.name() == name.trim())
                })
                .unwrap_or(LlCombineMode::Reduce),
            node_sums: lookup("NCCL_EP_NODE_SUMS")
                .and_then(|name| {
                    NodeSums::ALL
                        .into_iter()
                        .find(|sums| sums.name() == name.trim())
                })
                .unwrap_or_default(),
            tuning_file: lookup("NCCL_EP_TUNING_FILE").filter(|path| !path.is_empty()),
            ht_chunk_bytes: lookup("NCCL_EP_HT_CHUNK_BYTES")
                .and_then(|text| text.trim().parse().ok())
                .filter(|&bytes| bytes > 0),
            check: lookup("NCCL_EP_CHECK").is_some_and(|value| value.trim() == "1"),
            host_id: lookup("NCCL_HOSTID").filter(|id| !id.is_empty()),
            nvtx_injection: lookup("NVTX_INJECTION64_PATH").filter(|path| !path.is_empty()),
            verbosity: lookup("NCCL_DEBUG")
                .map_or(Verbosity::Nothing, |level| Verbosity::of(&level)),
            debug_file: lookup("NCCL_DEBUG_FILE").filter(|path| !path.is_empty()),
        }
    }
}

/// `NCCL_EP_NCCL_LIBRARY`: the file of the NCCL to use, read when this process's first group is created.
pub fn nccl_library() -> Option<Vec<u8>> {
    let path = std::env::var_os("NCCL_EP_NCCL_LIBRARY")?.into_vec();
    (!path.is_empty()).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_apply_when_nothing_is_set() {
        let env = Env::from_lookup(|_| None);
        assert_eq!(env.timeout, Duration::from_secs(100));
        assert_eq!(env.ll_combine, LlCombineMode::Reduce);
        assert_eq!(env.node_sums, NodeSums::HomeFirst);
        assert_eq!(env.host_id, None);
        assert_eq!(env.verbosity, Verbosity::Nothing);
    }

    #[test]
    fn values_are_read_and_nonsense_is_ignored() {
        let set = |name: &str| match name {
            "NCCL_EP_TIMEOUT_MS" => Some("250".to_owned()),
            "NCCL_HOSTID" => Some("left".to_owned()),
            "NCCL_EP_TUNING_FILE" => Some("times.json".to_owned()),
            "NCCL_EP_LL_COMBINE" => Some("exact".to_owned()),
            "NCCL_EP_NODE_SUMS" => Some("invariant ".to_owned()),
            "NCCL_DEBUG" => Some("info".to_owned()),
            "NCCL_EP_CHECK" => Some("1".to_owned()),
            _ => None,
        };
        let env = Env::from_lookup(set);
        assert_eq!(env.timeout, Duration::from_millis(250));
        assert_eq!(env.host_id.as_deref(), Some("left"));
        assert_eq!(env.ll_combine, LlCombineMode::Exact);
        assert_eq!(env.node_sums, NodeSums::Invariant);
        assert_eq!(env.tuning_file.as_deref(), Some("times.json"));
        assert_eq!(env.verbosity, Verbosity::Groups);
        assert!(env.check);
        let nonsense = Env::from_lookup(|_| Some("-1".to_owned()));
        assert_eq!(nonsense.timeout, Duration::from_secs(100));
        assert_eq!(nonsense.ll_combine, LlCombineMode::Reduce);
        assert_eq!(nonsense.node_sums, NodeSums::HomeFirst);
        assert!(!nonsense.check);
    }

    #[test]
    fn docs_list_the_same_variables() {
        let docs = include_str!("../docs/env.md");
        let _ = Env::from_lookup(|name| {
            let row = format!("| `{name}` |");
            assert!(docs.contains(&row), "docs/env.md lacks {name}");
            None
        });
    }
}

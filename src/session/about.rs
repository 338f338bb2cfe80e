//! The description of a new group, for logs: one line.

use crate::backend::{Profile, RankChoices};
use crate::model::group::{Algorithm, GroupFacts, NodeSums};
use std::fmt::{Display, Formatter, Result};

/// What the description says about a group, on one rank.
#[derive(Debug)]
pub struct About {
    /// The number of the rank's device in this process.
    pub(super) device: usize,
    pub(super) facts: GroupFacts,
    pub(super) nodes: usize,
    /// How the sums of nodes are added.
    pub(super) sums: NodeSums,
    /// Version and file of NCCL.
    pub(super) nccl: (String, String),
    pub(super) backend: Profile,
    pub(super) choices: RankChoices,
}

impl Display for About {
    fn fmt(&self, to: &mut Formatter<'_>) -> Result {
        let facts = &self.facts;
        let (backend, nodes) = (self.backend.backend, self.nodes);
        write!(to, "{backend} backend, rank {} of {}", facts.rank, facts.ranks)?;
        write!(to, " on {nodes} node{}", if nodes == 1 { "" } else { "s" })?;
        let (version, file) = &self.nccl;
        write!(to, ", NCCL {version} from {file}")?;
        write!(to, ", {}, {} experts", facts.algorithm.name(), facts.experts)?;
        write!(to, ", rows of {} bytes", facts.row_bytes)?;
        match facts.max_tokens {
            Some(tokens) => write!(to, ", at most {tokens} tokens of a rank")?,
            None => write!(to, ", any number of tokens")?,
        }
        match self.backend.window_bytes {
            Some(bytes) => write!(to, ", windows of {} MiB", bytes.div_ceil(1 << 20))?,
            None => write!(to, ", windows as needed")?,
        }
        write!(to, ", waits of at most {} ms", self.choices.timeout.as_millis())?;
        if facts.algorithm == Algorithm::LowLatency {
            write!(to, ", combines {}", facts.ll_combine.name())?;
        }
        if nodes > 1 {
            write!(to, ", sums of nodes {}", self.sums.name())?;
        }
        if self.choices.check {
            write!(to, ", checks")?;
        }
        if !self.choices.programmatic {
            write!(to, ", no programmatic launches")?;
        }
        if let Some(bytes) = self.backend.chunk_bytes {
            write!(to, ", passes of {bytes} bytes")?;
        }
        match &self.choices.tuning_file {
            None => write!(to, ", no tuning file"),
            Some(file) if self.backend.tuned => write!(to, ", tuning file {file}"),
            Some(file) => write!(to, ", tuning file {file} not in use"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::group::LlCombineMode;
    use crate::model::ids::GroupRank;
    use crate::tuning::Shapes;
    use std::time::Duration;

    #[test]
    fn a_group_is_one_line() {
        let facts = GroupFacts {
            ranks: 16,
            rank: GroupRank::new(3),
            experts: 256,
            max_tokens: Some(128),
            row_bytes: 14336,
            ll_combine: LlCombineMode::Reduce,
            ..GroupFacts::SAMPLE
        };
        let backend = Profile {
            backend: "cuda",
            window_bytes: Some((7 << 20) + 1),
            most_blocks: Some(132),
            tuned: true,
            chunk_bytes: None,
        };
        let mut about = About {
            device: 3,
            facts,
            nodes: 2,
            sums: NodeSums::Invariant,
            nccl: ("2.28.9".to_owned(), "/lib/libnccl.so.2".to_owned()),
            backend,
            choices: RankChoices {
                timeout: Duration::from_millis(2500),
                tuning_file: Some("times.json".to_owned()),
                shapes: Shapes::default(),
                check: true,
                programmatic: false,
            },
        };
        let line = "cuda backend, rank 3 of 16 on 2 nodes, NCCL 2.28.9 from /lib/libnccl.so.2, \
                    low latency, 256 experts, rows of 14336 bytes, at most 128 tokens of a rank, \
                    windows of 8 MiB, waits of at most 2500 ms, combines reduce, sums of nodes invariant, \
                    checks, no programmatic launches, tuning file times.json";
        assert_eq!(about.to_string(), line);
        about.backend.tuned = false;
        assert_eq!(about.to_string(), format!("{line} not in use"));
        about.facts.algorithm = Algorithm::HighThroughput;
        about.backend.chunk_bytes = Some(4096);
        let told = about.to_string();
        assert!(told.contains(", checks, no programmatic launches, passes of 4096 bytes, tuning file"), "{told}");
    }
}

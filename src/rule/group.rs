//! Rules for the settings of a new group.

use crate::error::refusal::{OfSettings, Setting, Subject};
use crate::error::{Error, Result};
use crate::model::group::{Algorithm, GroupFacts, GroupSettings, LlCombineMode, ROW_ALIGN, most_tokens};
use crate::model::ids::GroupRank;
use crate::model::topology::Topology;

/// Checks `settings` for `rank` of `ranks`; `chunk_bytes` is from the environment.
pub fn check(
    settings: &GroupSettings,
    chunk_bytes: Option<usize>,
    ranks: usize,
    rank: GroupRank,
) -> Result<GroupFacts> {
    Ok(GroupFacts {
        algorithm: settings.algorithm,
        ranks,
        rank,
        experts: experts(settings, ranks)?,
        max_tokens: max_tokens(settings, ranks)?,
        row_bytes: row_bytes(settings)?,
        ll_combine: settings.ll_combine,
        ht_chunk_bytes: chunk_bytes.filter(|_| settings.algorithm == Algorithm::HighThroughput),
        channels: settings.channels,
        zones: settings.zones,
        tensor_rows: settings.tensor_rows,
        drops: settings.drops,
    })
}

fn refused(setting: Setting, rule: OfSettings) -> Error {
    Error::argument(Subject::Setting(setting), rule)
}

fn experts(settings: &GroupSettings, ranks: usize) -> Result<usize> {
    let experts = settings.experts;
    if experts == 0 || !experts.is_multiple_of(ranks) {
        return Err(
            refused(Setting::Experts, OfSettings::MultipleOfRanks).got(experts, format_args!("a multiple of {ranks}"))
        );
    }
    Ok(experts)
}

fn max_tokens(settings: &GroupSettings, ranks: usize) -> Result<Option<usize>> {
    let Some(tokens) = settings.max_tokens else {
        return match settings.algorithm {
            Algorithm::HighThroughput => Ok(None),
            Algorithm::LowLatency => {
                Err(refused(Setting::MaxTokens, OfSettings::BoundNeeded).got(0, "1 or more in low latency"))
            }
        };
    };
    let most = most_tokens(ranks);
    if tokens > most {
        return Err(refused(Setting::MaxTokens, OfSettings::CountableRows)
            .got(tokens, format_args!("at most {most} with {ranks} ranks")));
    }
    Ok(Some(tokens))
}

fn row_bytes(settings: &GroupSettings) -> Result<usize> {
    let bytes = settings.row_bytes;
    if bytes == 0 || !bytes.is_multiple_of(ROW_ALIGN) {
        return Err(refused(Setting::RowBytes, OfSettings::MultipleOf16).got(bytes, "a multiple of 16"));
    }
    Ok(bytes)
}

/// Refuses facts that are impossible over several nodes.
pub fn check_nodes(facts: &GroupFacts, topology: &Topology) -> Result<()> {
    let low_latency = facts.algorithm == Algorithm::LowLatency;
    if topology.nodes() > 1 && low_latency && facts.ll_combine == LlCombineMode::Exact {
        return Err(refused(Setting::LlCombine, OfSettings::OneNode)
            .got(LlCombineMode::Exact.name(), LlCombineMode::Reduce.name()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: GroupSettings = GroupSettings {
        algorithm: Algorithm::LowLatency,
        experts: 16,
        max_tokens: Some(50),
        row_bytes: 14_336,
        channels: None,
        zones: false,
        tensor_rows: 0,
        drops: false,
        timeout: None,
        sms: None,
        ll_combine: LlCombineMode::Reduce,
    };

    fn checked(settings: &GroupSettings, rank: usize) -> Result<GroupFacts> {
        check(settings, Some(4096), 8, GroupRank::new(rank))
    }

    #[test]
    fn valid_settings_pass() {
        let facts = checked(&VALID, 3).unwrap();
        assert_eq!((facts.local_experts(), facts.max_tokens, facts.rank), (2, Some(50), GroupRank::new(3)));
        assert_eq!((facts.recv_rows(), facts.channels), (Some(400), None));
        assert_eq!(facts.ht_chunk_bytes, None);
    }

    #[test]
    fn a_group_without_a_bound_is_for_high_throughput() {
        let unbounded = GroupSettings { max_tokens: None, ..VALID };
        assert!(checked(&unbounded, 0).is_err());
        let ht = checked(&GroupSettings { algorithm: Algorithm::HighThroughput, ..unbounded }, 0);
        let ht = ht.unwrap();
        assert_eq!((ht.max_tokens, ht.ht_chunk_bytes), (None, Some(4096)));
    }
}

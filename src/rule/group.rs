//! Rules for the settings of a new group.

use crate::error::refusal::{OfSettings, Setting, Subject};
use crate::error::{Error, Result};
use crate::model::group::{Algorithm, GroupChoices, GroupFacts, GroupSettings, LlCombineMode, ROW_ALIGN, most_tokens};
use crate::model::ids::GroupRank;
use crate::model::topology::Topology;

/// Checks `settings` for `rank` of `ranks`.
pub fn check(settings: &GroupSettings, choices: &GroupChoices, ranks: usize, rank: GroupRank) -> Result<GroupFacts> {
    let experts = experts(settings, ranks)?;
    let max_tokens = max_tokens(settings, ranks)?;
    Ok(GroupFacts {
        algorithm: settings.algorithm,
        ranks,
        rank,
        experts,
        max_tokens,
        max_recv_rows: recv_rows(settings, max_tokens, ranks)?,
        row_bytes: row_bytes(settings)?,
        ll_combine: choices.ll_combine,
        ht_chunk_bytes: match settings.algorithm {
            Algorithm::LowLatency => None,
            Algorithm::HighThroughput => choices.ht_chunk_bytes,
        },
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

/// The bound of received rows. It must be all that the ranks may send, as nothing checks it at run time yet.
fn recv_rows(settings: &GroupSettings, max_tokens: Option<usize>, ranks: usize) -> Result<Option<usize>> {
    let all = max_tokens.map(|tokens| tokens * ranks);
    match (settings.max_recv_rows, all) {
        (Some(rows), Some(all)) if rows != all => {
            Err(refused(Setting::RecvRows, OfSettings::RoomForAllRanks).got(rows, all))
        }
        (Some(rows), None) => Err(refused(Setting::RecvRows, OfSettings::RoomForAllRanks).got(rows, "none")),
        (_, all) => Ok(all),
    }
}

fn row_bytes(settings: &GroupSettings) -> Result<usize> {
    let bytes = settings.row_bytes;
    if bytes == 0 || !bytes.is_multiple_of(ROW_ALIGN) {
        return Err(refused(Setting::RowBytes, OfSettings::MultipleOf16).got(bytes, "a multiple of 16"));
    }
    Ok(bytes)
}

/// Refuses what is not possible over several nodes.
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
        max_recv_rows: None,
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
        let choices = GroupChoices { ll_combine: LlCombineMode::Exact, ht_chunk_bytes: Some(4096) };
        check(settings, &choices, 8, GroupRank::new(rank))
    }

    #[test]
    fn valid_settings_pass() {
        let facts = checked(&VALID, 3).unwrap();
        assert_eq!((facts.local_experts(), facts.max_tokens, facts.rank), (2, Some(50), GroupRank::new(3)));
        assert_eq!((facts.max_recv_rows, facts.channels), (Some(400), None));
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

    #[test]
    fn each_broken_rule_is_named() {
        let with = |change: fn(&mut GroupSettings)| {
            let mut settings = VALID;
            change(&mut settings);
            settings
        };
        let cases = [
            (with(|it| it.experts = 0), Setting::Experts),
            (with(|it| it.experts = 12), Setting::Experts),
            (with(|it| it.row_bytes = 0), Setting::RowBytes),
            (with(|it| it.row_bytes = 24), Setting::RowBytes),
            (with(|it| it.max_tokens = Some(u32::MAX as usize)), Setting::MaxTokens),
            (with(|it| it.max_recv_rows = Some(399)), Setting::RecvRows),
        ];
        for (settings, setting) in cases {
            let error = checked(&settings, 0).unwrap_err();
            assert_eq!(error.refused().map(|(subject, _)| subject), Some(Subject::Setting(setting)), "{error}");
        }
    }
}

//! `ncclEpCreateGroup`: the configuration's rules.
#![forbid(unsafe_code)]

use crate::abi::read::GroupConfig;
use crate::error::{Error, Result};
use crate::model::group::{Algorithm, GroupFacts, LlCombineMode, ROW_ALIGN, most_tokens};

/// Checks `config` for `rank` of `ranks`.
pub fn check(
    config: &GroupConfig,
    ll_combine: LlCombineMode,
    ranks: usize,
    rank: usize,
) -> Result<GroupFacts> {
    if config.version != 1 {
        return Err(Error::argument("config.version", "must be 1").got(config.version, 1));
    }
    let algorithm = match config.algorithm {
        0 => Algorithm::LowLatency,
        1 => Algorithm::HighThroughput,
        other => {
            return Err(
                Error::argument("config.algorithm", "must be a known algorithm")
                    .got(other, "0 (low latency) or 1 (high throughput)"),
            );
        }
    };
    Ok(GroupFacts {
        algorithm,
        ranks,
        rank,
        experts: experts(config, ranks)?,
        max_tokens: max_tokens(config, algorithm, ranks)?,
        row_bytes: row_bytes(config)?,
        ll_combine,
        channels: (config.num_channels > 0).then_some(config.num_channels as usize),
    })
}

fn experts(config: &GroupConfig, ranks: usize) -> Result<usize> {
    let experts = config.num_experts as usize;
    if experts == 0 || !experts.is_multiple_of(ranks) {
        return Err(Error::argument(
            "config.num_experts",
            "must be a positive multiple of the number of ranks",
        )
        .got(experts, format_args!("a multiple of {ranks}")));
    }
    Ok(experts)
}

fn max_tokens(config: &GroupConfig, algorithm: Algorithm, ranks: usize) -> Result<Option<usize>> {
    let argument = "config.max_tokens_per_rank";
    let tokens = config.max_tokens_per_rank as usize;
    if tokens == 0 {
        return match algorithm {
            Algorithm::HighThroughput => Ok(None),
            Algorithm::LowLatency => Err(Error::argument(
                argument,
                "NCCL_EP_AUTO is for high throughput only",
            )
            .got(0, "1 or more in low latency")),
        };
    }
    let most = most_tokens(ranks);
    if tokens > most {
        return Err(
            Error::argument(argument, "received rows must be countable in 31 bits")
                .got(tokens, format_args!("at most {most} with {ranks} ranks")),
        );
    }
    Ok(Some(tokens))
}

fn row_bytes(config: &GroupConfig) -> Result<usize> {
    let bytes = config.token_size_bytes as usize;
    if bytes == 0 || !bytes.is_multiple_of(ROW_ALIGN) {
        return Err(Error::argument(
            "config.token_size_bytes",
            "must be a positive multiple of 16",
        )
        .got(bytes, "a multiple of 16"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid() -> GroupConfig {
        GroupConfig {
            version: 1,
            algorithm: 0,
            num_experts: 16,
            max_tokens_per_rank: 50,
            token_size_bytes: 14_336,
            ..GroupConfig::default()
        }
    }

    fn checked(config: &GroupConfig, rank: usize) -> Result<GroupFacts> {
        check(config, LlCombineMode::Exact, 8, rank)
    }

    #[test]
    fn a_valid_configuration_passes() {
        let facts = checked(&valid(), 3).unwrap();
        assert_eq!(
            (facts.local_experts(), facts.max_tokens, facts.rank),
            (2, Some(50), 3)
        );
        assert_eq!(facts.channels, None);
    }

    #[test]
    fn auto_is_for_high_throughput() {
        let auto = GroupConfig {
            max_tokens_per_rank: 0,
            ..valid()
        };
        assert!(checked(&auto, 0).is_err());
        let ht = checked(
            &GroupConfig {
                algorithm: 1,
                ..auto
            },
            0,
        )
        .unwrap();
        assert_eq!(ht.max_tokens, None);
    }

    #[test]
    fn each_broken_rule_is_named() {
        let cases = [
            (
                GroupConfig {
                    version: 2,
                    ..valid()
                },
                "config.version",
            ),
            (
                GroupConfig {
                    algorithm: 2,
                    ..valid()
                },
                "config.algorithm",
            ),
            (
                GroupConfig {
                    num_experts: 0,
                    ..valid()
                },
                "config.num_experts",
            ),
            (
                GroupConfig {
                    num_experts: 12,
                    ..valid()
                },
                "config.num_experts",
            ),
            (
                GroupConfig {
                    token_size_bytes: 0,
                    ..valid()
                },
                "config.token_size_bytes",
            ),
            (
                GroupConfig {
                    token_size_bytes: 24,
                    ..valid()
                },
                "config.token_size_bytes",
            ),
            (
                GroupConfig {
                    max_tokens_per_rank: u32::MAX,
                    ..valid()
                },
                "config.max_tokens_per_rank",
            ),
        ];
        for (config, argument) in cases {
            let error = checked(&config, 0).unwrap_err();
            assert!(error.text().starts_with(argument), "{error}");
        }
    }
}

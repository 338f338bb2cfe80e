//! What groups may have so that their LL kernels can count it.

use crate::backend::cuda::ll::fingerprint;
use crate::backend::cuda::params::ll::{LL_INDEX_BITS, LL_MAX_RANKS, LL_STATIC_SHARED_BYTES};
use crate::error::refusal::{AmongRanks, OfSettings, Setting, Subject};
use crate::error::{Error, Result};
use crate::model::group::GroupFacts;

/// Dynamic shared memory that a block may have without opt-in: 48 KiB less its static variables.
const MAX_SHARED_BYTES: usize = (48 << 10) - LL_STATIC_SHARED_BYTES as usize;
/// Shared memory of a dispatch block per expert of the group.
pub const SHARED_BYTES_PER_EXPERT: usize = 8;

/// Refuses facts that do not fit the kernels' shared memory or the fields of their packets.
pub fn check_limits(facts: &GroupFacts, max_tokens: usize, nodes: usize) -> Result<()> {
    let local = (1 << (32 - LL_INDEX_BITS)) - 1;
    if nodes > 1 && facts.ranks > LL_MAX_RANKS {
        return Err(Error::usage(Subject::Communicator, AmongRanks::FewerRanks)
            .got(facts.ranks, format_args!("at most {LL_MAX_RANKS}")));
    }
    let of_ranks = match nodes {
        1 => 0,
        _ => LL_MAX_RANKS * size_of::<u32>(),
    };
    let experts = ((MAX_SHARED_BYTES - of_ranks) / SHARED_BYTES_PER_EXPERT).min(local * facts.ranks);
    let rows = ((1 << LL_INDEX_BITS) - 1).min(i32::MAX as usize / facts.local_experts());
    let row_bytes = fingerprint::MOST_ROW_BYTES;
    let limits = [
        (Setting::Experts, facts.experts, experts),
        (Setting::RowBytes, facts.row_bytes, row_bytes),
        (Setting::MaxTokens, max_tokens, rows / facts.ranks),
    ];
    let Some((setting, got, most)) = limits.into_iter().find(|(_, got, most)| got > most) else {
        return Ok(());
    };
    let rule = OfSettings::LlKernelsCount;
    Err(Error::usage(Subject::Setting(setting), rule).got(got, format_args!("at most {most}")))
}

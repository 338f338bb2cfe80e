//! What the ranks tell each other on the host's side when an HT handle is made: their numbers of tokens
//! and of ids per token, and whether any refuses.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::error::{Error, Result};
use crate::model::ops::Stream;

const NUMBER_BYTES: usize = 8;

/// Each rank's number of tokens, `most` at most. Collective; `mine` is this rank's tokens and ids per token, or an error
/// on a rank that refused its arguments.
pub fn exchange(
    bootstrap: &Bootstrap,
    mine: Result<(usize, usize)>,
    most: usize,
    stream: Stream,
) -> Result<Vec<usize>> {
    let record = mine.as_ref().map_err(Error::clone).map(|(tokens, top_k)| {
        [*tokens as u64, *top_k as u64]
            .map(u64::to_le_bytes)
            .concat()
    });
    let records = bootstrap.agree(record, 2 * NUMBER_BYTES, stream)?;
    let (_, my_top_k) = mine?;
    let tokens = records.iter().enumerate();
    tokens
        .map(|(rank, record)| tokens_of(rank, record, my_top_k, most))
        .collect()
}

/// The number of tokens that `rank` tells in `record`.
fn tokens_of(rank: usize, record: &[u8], my_top_k: usize, most: usize) -> Result<usize> {
    let [tokens, top_k] = record.as_chunks::<NUMBER_BYTES>().0 else {
        return Err(Error::internal("a rank's shape of the wrong length"));
    };
    let (tokens, top_k) = (u64::from_le_bytes(*tokens), u64::from_le_bytes(*top_k));
    if top_k != my_top_k as u64 {
        let rule = format!("must be the same on every rank, but rank {rank} differs");
        return Err(Error::argument("topk_idx.sizes[1]", rule)
            .got(my_top_k, format_args!("{top_k} as on rank {rank}")));
    }
    usize::try_from(tokens)
        .ok()
        .filter(|&tokens| tokens <= most)
        .ok_or_else(|| Error::internal(format!("rank {rank} tells of more than {most} tokens")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_cannot_tell_of_too_many_tokens() {
        let told = |tokens: u64| {
            let record = [tokens, 2].map(u64::to_le_bytes).concat();
            tokens_of(1, &record, 2, 6)
        };
        assert_eq!(told(6).unwrap(), 6);
        for tokens in [7, 1 << 61, u64::MAX] {
            assert!(told(tokens).is_err(), "{tokens}");
        }
    }
}

//! What the ranks tell each other on the host's side when an HT handle is made: their numbers of tokens
//! and of ids per token, and whether any refuses.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::error::{Error, Result};
use crate::model::ops::Stream;

const NUMBER_BYTES: usize = 8;

/// Each rank's number of tokens. Collective; `mine` is this rank's tokens and ids per token, or an error
/// on a rank that refused its arguments.
pub fn exchange(
    bootstrap: &Bootstrap,
    mine: Result<(usize, usize)>,
    stream: Stream,
) -> Result<Vec<usize>> {
    let record = mine.as_ref().map_err(Error::clone).map(|(tokens, top_k)| {
        [*tokens as u64, *top_k as u64]
            .map(u64::to_le_bytes)
            .concat()
    });
    let records = bootstrap.agree(record, 2 * NUMBER_BYTES, stream)?;
    let (_, my_top_k) = mine?;
    let mut tokens = Vec::new();
    for (rank, record) in records.iter().enumerate() {
        let [theirs, top_k] = record.as_chunks::<NUMBER_BYTES>().0 else {
            return Err(Error::internal("a rank's shape of the wrong length"));
        };
        let (theirs, top_k) = (u64::from_le_bytes(*theirs), u64::from_le_bytes(*top_k));
        if top_k != my_top_k as u64 {
            let rule = format!("must be the same on every rank, but rank {rank} differs");
            return Err(Error::argument("topk_idx.sizes[1]", rule)
                .got(my_top_k, format_args!("{top_k} as on rank {rank}")));
        }
        tokens.push(usize::try_from(theirs).unwrap_or(0));
    }
    Ok(tokens)
}

//! The rows of a rank-major dispatch: a token's row once, however many of the rank's experts it names, with its ids and
//! weights.
#![allow(unsafe_code)]

use crate::backend::host::device::bytes_mut;
use crate::backend::host::ll::HostLl;
use crate::backend::host::ll::dispatch::{Landed, SentTokens};
use crate::backend::host::ll::last::Placed;
use crate::backend::host::numeric::{copy_row, row};
use crate::backend::host::scaled;
use crate::error::{Error, Result};
use crate::model::layout::RowOf;
use crate::model::ops::{IntWidth, LlBeside, LlDispatch};

const WEIGHT_BYTES: usize = size_of::<f32>();
/// Every byte of -1, the id of an entry that names no expert of this rank.
const NONE: u8 = 0xff;

impl HostLl {
    /// Writes what all sources have sent to the outputs `[R, M, *]`.
    pub(super) fn place_by_rank(
        &self,
        (op, beside): (&LlDispatch, &LlBeside),
        out: &mut [u8],
        sent: &[SentTokens<'_>],
    ) -> Result<Landed> {
        let (experts, top_k) = (self.facts().experts_of(self.facts().rank), self.routing.top_k);
        let entries = self.rows(op.layout)? * top_k;
        let width = beside.out_ids.width;
        // SAFETY: `rule` has checked both tensors `[R, M, K]`; the caller leaves them to the operation.
        let (ids, weights) = unsafe {
            (
                bytes_mut(beside.out_ids.data, entries * width.bytes()),
                bytes_mut(beside.out_weights, entries * WEIGHT_BYTES),
            )
        };
        ids.fill(NONE);
        let mut landed = Landed::default();
        for (source, sent) in sent.iter().enumerate() {
            let mut placed: Vec<Placed> = Vec::new();
            for (token, k, expert) in sent.entries(self.facts()) {
                let Some(local) = expert.checked_sub(experts.start) else { continue };
                if local >= experts.len() {
                    continue;
                }
                if placed.last().is_none_or(|last| last.token != token) {
                    let to = RowOf { zone: source, ordinal: placed.len() };
                    let at = op.layout.number(to);
                    copy_row(out, at, sent.rows.payload(token)?)?;
                    if let Some(scaled) = &op.scaled {
                        // SAFETY: `rule` has checked the tensor `[R, M, S]`; the caller leaves it to the operation.
                        unsafe { scaled::store(scaled, to, sent.rows.scales(token)?) }?;
                    }
                    copy_row(weights, at, row(sent.weights, token, top_k * WEIGHT_BYTES)?)?;
                    placed.push(Placed { token, k: 0, row: at });
                }
                let at = placed.last().ok_or_else(|| Error::internal("an entry without a row"))?.row;
                let id = (beside.first_id + local) as i64;
                match width {
                    IntWidth::Bits32 => copy_row(ids, at * top_k + k, &(id as i32).to_ne_bytes())?,
                    IntWidth::Bits64 => copy_row(ids, at * top_k + k, &id.to_ne_bytes())?,
                }
            }
            landed.counts.push(placed.len() as u32);
            landed.placed.push(placed);
        }
        Ok(landed)
    }
}

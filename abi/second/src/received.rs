//! The tensors for the rows that a dispatch delivers, and the room that HT requires in them.
#![allow(unsafe_code)]

use crate::objects::{Group, Handle};
use crate::recipe::Scales;
use crate::tensor::{self, first, rows};
use crate::types::ncclEpDispatchOutputs_t;
use nccl_ep_abi::refuse;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::ops::Stream;
use nccl_ep_core::model::tensor::Tensor;

/// The tensors of received rows.
pub struct Received {
    /// Rows.
    pub tokens: Tensor,
    /// Their weights.
    pub weights: Tensor,
    /// Their ids.
    pub ids: Tensor,
}

impl Received {
    /// Reads those of a dispatch that delivers all of them.
    ///
    /// # Safety
    /// As of `ncclEpDispatch`.
    pub unsafe fn read(group: &Group, outputs: &ncclEpDispatchOutputs_t) -> Result<Self> {
        // SAFETY: this function's contract.
        unsafe {
            Ok(Self {
                tokens: tensor::required(group, "outputs.tokens", outputs.tokens)?,
                weights: tensor::required(group, "outputs.topk_weights", outputs.topk_weights)?,
                ids: tensor::required(group, "outputs.topk_idx", outputs.topk_idx)?,
            })
        }
    }

    /// As [`Room::check`], for all of them.
    pub fn check(&mut self, room: Room) -> Result<()> {
        let all = &mut [
            ("outputs.tokens", &mut self.tokens),
            ("outputs.topk_weights", &mut self.weights),
            ("outputs.topk_idx", &mut self.ids),
        ];
        room.check(all)?;
        check_emptiness(rows(&self.tokens), rows(&self.weights))?;
        check_emptiness(rows(&self.ids), rows(&self.weights))
    }
}

/// Refuses weights without rows, or rows without weights.
pub fn check_emptiness(rows: usize, weights: usize) -> Result<()> {
    if (rows == 0) == (weights == 0) {
        return Ok(());
    }
    let rule = "must be 0 with outputs.tokens and outputs.topk_idx, or not with them";
    Err(refuse::argument("outputs.topk_weights.sizes[0]", rule).got(weights, "all of them empty, or none"))
}

/// The rows that HT tensors must have room for.
#[derive(Clone, Copy)]
pub struct Room {
    least: usize,
    /// Whether that is the group's bound; otherwise it is the number of received rows.
    is_bound: bool,
}

impl Room {
    /// For a dispatch on `handle`. Waits in a group without a bound.
    pub fn of(handle: &Handle, stream: Stream) -> Result<Self> {
        let group = &handle.group;
        if let Some(least) = group.kept.recv_rows {
            return Ok(Self { least, is_bound: true });
        }
        if group.session.device().is_captured(stream)? {
            let text = "stream: must not be captured in a group without max_recv_tokens_per_rank";
            return Err(Error::new(Code::InvalidUsage, text));
        }
        // If it is unknown, the operation finds out.
        let least = handle.core.rows_in_memory(stream)?.unwrap_or(0);
        Ok(Self { least, is_bound: false })
    }

    /// Refuses tensors without that room, and cuts off what is beyond the bound.
    pub fn check(self, all: &mut [(&str, &mut Tensor)]) -> Result<()> {
        let Self { least, is_bound } = self;
        for (name, tensor) in all {
            if rows(tensor) < least {
                let what =
                    if is_bound { "the group's max_recv_tokens_per_rank" } else { "all rows that this rank receives" };
                let rule = format_args!("must have room for {what}");
                return Err(refuse::argument(format_args!("{name}.sizes[0]"), rule)
                    .got(rows(tensor), format_args!("{least} or more")));
            }
            if is_bound {
                **tensor = first(tensor, least);
            }
        }
        Ok(())
    }

    /// The same for the scales of rows whose `tokens` have passed. Without a bound either may be longer than the other:
    /// the core gets as many rows of both.
    pub fn of_scales(self, scales: &Scales, tokens: &mut Tensor) -> Result<Option<Tensor>> {
        let mut out = scales.out;
        if let Some(out) = &mut out {
            self.check(&mut [("outputs.scales", out)])?;
            let both = rows(tokens).min(rows(out));
            (*tokens, *out) = (first(tokens, both), first(out, both));
        }
        Ok(out)
    }
}

//! The tensors of a dispatch, and the room that HT requires in those for received rows.
#![allow(unsafe_code)]

use crate::objects::{Handle, Layout};
use crate::recipe::Scales;
use crate::tensor::{self, absent, first, rows};
use crate::types::{ncclEpDispatchInputs_t, ncclEpDispatchOutputs_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::ops::Stream;
use nccl_ep_core::model::tensor::Tensor;

/// The tensors of a dispatch without scales and counters. Which ones there are depends on the layout and the pass.
pub struct Rows {
    /// Rows to send.
    pub tokens: Tensor,
    /// Their weights.
    pub weights: Option<Tensor>,
    /// Gets received rows.
    pub out: Tensor,
    /// Gets their weights.
    pub out_weights: Option<Tensor>,
    /// Gets their ids.
    pub out_ids: Option<Tensor>,
}

impl Rows {
    /// Reads those that there are, and refuses others.
    ///
    /// # Safety
    /// As of `ncclEpDispatch`.
    pub unsafe fn read(
        handle: &Handle,
        is_backward: bool,
        (inputs, outputs): (&ncclEpDispatchInputs_t, &ncclEpDispatchOutputs_t),
    ) -> Result<Self> {
        let group = &handle.group;
        let (has_weights, has_ids, rule) = match (handle.layout, is_backward) {
            (Layout::ExpertMajor, _) => (false, false, "must be NULL in low latency, expert-major"),
            (_, true) => (false, false, "must be NULL in a backward pass"),
            (Layout::Zones(_), false) => (true, false, "must be NULL, as each slot is of one expert"),
            _ => (true, true, ""),
        };
        let read = |is_there: bool, name, raw| match is_there {
            // SAFETY: this function's contract.
            true => unsafe { tensor::required(group, name, raw) }.map(Some),
            false => absent(name, raw, rule).map(|()| None),
        };
        let weights = read(has_weights, "inputs.topk_weights", inputs.topk_weights)?;
        let out_weights = read(has_weights, "outputs.topk_weights", outputs.topk_weights)?;
        let out_ids = read(has_ids, "outputs.topk_idx", outputs.topk_idx)?;
        // SAFETY: as above.
        let (tokens, out) = unsafe {
            let tokens = tensor::required(group, "inputs.tokens", inputs.tokens)?;
            (tokens, tensor::required(group, "outputs.tokens", outputs.tokens)?)
        };
        Ok(Self { tokens, weights, out, out_weights, out_ids })
    }

    /// HT: [`Room::check`] of all outputs. Either all are empty or none is.
    pub fn check(&mut self, room: Room) -> Result<()> {
        room.check("outputs.tokens", &mut self.out)?;
        let beside = [("outputs.topk_weights", &mut self.out_weights), ("outputs.topk_idx", &mut self.out_ids)];
        for (name, tensor) in beside {
            tensor.as_mut().map_or(Ok(()), |it| room.check(name, it))?;
        }
        let Some(weights) = self.out_weights.as_ref().map(rows) else { return Ok(()) };
        for other in [Some(&self.out), self.out_ids.as_ref()].into_iter().flatten() {
            if (rows(other) == 0) != (weights == 0) {
                let rule = "must be 0 with outputs.tokens and outputs.topk_idx, or not with them";
                let refused = refuse::argument("outputs.topk_weights.sizes[0]", rule);
                return Err(refused.got(weights, "all of them empty, or none"));
            }
        }
        Ok(())
    }
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

    /// Refuses a tensor without that room, and cuts off what is beyond the bound.
    fn check(self, name: &str, tensor: &mut Tensor) -> Result<()> {
        let Self { least, is_bound } = self;
        if rows(tensor) < least {
            let what =
                if is_bound { "the group's max_recv_tokens_per_rank" } else { "all rows that this rank receives" };
            let rule = format_args!("must have room for {what}");
            return Err(refuse::argument(format_args!("{name}.sizes[0]"), rule)
                .got(rows(tensor), format_args!("{least} or more")));
        }
        if is_bound {
            *tensor = first(tensor, least);
        }
        Ok(())
    }

    /// The same for the scales of `out_rows` rows. Without a bound either may be longer than the other.
    pub fn of_scales(self, scales: &Scales, out_rows: usize) -> Result<Option<Tensor>> {
        let Some(mut out) = scales.out else { return Ok(None) };
        let scale_rows = rows(&out);
        self.check("outputs.scales", &mut out)?;
        if self.is_bound && scale_rows != out_rows {
            let error = refuse::argument("outputs.scales.sizes[0]", "must be that of outputs.tokens");
            return Err(error.got(scale_rows, out_rows));
        }
        Ok(Some(out))
    }
}

//! Dispatch.
#![allow(unsafe_code)]

use crate::enums::ncclEpExpertIdKind_t;
use crate::guard::{GUARD, Subject};
use crate::objects::{self, Handle, Layout};
use crate::options::{NO_SCALES, is_backward, known};
use crate::read::{self, number};
use crate::tensor::{self, absent, first, rows};
use crate::texts::not_served;
use crate::types::{
    cudaStream_t, ncclEpDispatchConfig_t, ncclEpDispatchInputs_t, ncclEpDispatchOutputs_t,
    ncclEpHandle_t, ncclEpLayoutInfo_t, ncclResult_t,
};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::group::Algorithm;
use nccl_ep_core::model::ops::Stream;
use nccl_ep_core::model::tensor::Tensor;
use nccl_ep_core::rule::DispatchTensors;

const GLOBAL_IDS: u32 = ncclEpExpertIdKind_t::NCCL_EP_EXPERT_ID_GLOBAL as u32;

/// A dispatch, as the caller passed it.
struct Dispatch {
    inputs: ncclEpDispatchInputs_t,
    outputs: ncclEpDispatchOutputs_t,
    info: Option<ncclEpLayoutInfo_t>,
    config: Option<ncclEpDispatchConfig_t>,
}

/// Sends each token to the ranks that host its experts. Every rank of the group calls it, in the
/// same order of operations. Enqueued on `stream`; the host does not wait, except in HT without a bound of received rows,
/// and in the first operation of an LL handle over several nodes.
///
/// With R ranks, L local experts, M max_dispatch_tokens_per_rank, T this rank's tokens, K top-k, H hidden
/// size; rows are of any type, a multiple of 16 bytes and at most max_token_bytes:
///
/// LL expert-major: inputs tokens [T, H]; outputs tokens [L, R*M, H], or longer in the first extent; layout_info
/// expert_counters int32 `[L]` or longer, required. The rows of each expert are packed from slot 0, by
/// source rank, token, k. The counter gets their number. Other slots keep their content.
///
/// LL rank-major: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [R, M, H], topk_idx int32 or int64
/// and topk_weights float32 [R, M, K]; layout_info src_rank_counters int32 `[R]`, may be NULL. A rank receives a token
/// once; the rows of each source rank are packed from slot 0, by token. The ids of a row keep their k, and are -1 where the
/// expert is elsewhere; so are those of all other slots, whose rows and weights keep their content.
///
/// HT flat: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [n, H], topk_idx int64 [n, K], topk_weights
/// float32 [n, K], where n is at least the group's max_recv_tokens_per_rank, B, of which the first B rows are used. A rank
/// receives a token once; rows are ordered by source rank and token. The ids of a
/// row are local expert ids, ascending, then -1; its weights are in the same order, then 0. An
/// expert that a token names more than once is there once, with the sum of its weights, in fp32 by
/// ascending k. Unused rows up to B are 0, -1 and 0. More rows than B are a failure of the group. In a backward pass
/// there are tokens only.
///
/// Delivered ids are local, or global where layout_info says so.
///
/// @param handle       the routing
/// @param inputs       tensors that are read
/// @param outputs      tensors that are written
/// @param layout_info  LL expert-major: required. HT: may be NULL
/// @param config       may be NULL
/// @param stream       stream to run on
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that is missing or breaks
/// a rule; `ncclInvalidUsage` for a handle without a routing or whose group was destroyed, while a staged operation of
/// the handle waits for completion, for a third staged operation of the group, and for what the library does not serve yet;
/// the code of the failure if the group has failed.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpDispatch(
    handle: ncclEpHandle_t,
    inputs: *const ncclEpDispatchInputs_t,
    outputs: *const ncclEpDispatchOutputs_t,
    layout_info: *const ncclEpLayoutInfo_t,
    config: *const ncclEpDispatchConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let subject = Subject::Handle(handle as usize);
    GUARD.run("ncclEpDispatch", subject, || {
        let handle = objects::handle(handle as usize)?;
        // SAFETY: this function's contract.
        unsafe {
            let call = Dispatch {
                inputs: read::required("inputs", inputs)?,
                outputs: read::required("outputs", outputs)?,
                info: read::optional("layout_info", layout_info)?,
                config: read::optional("config", config)?,
            };
            call.check(handle.group.session.facts().algorithm)?;
            call.run(&handle, Stream(stream as usize))
        }
    })
}

impl Dispatch {
    /// Checks options that are numbers, but for the direction.
    fn check(&self, algorithm: Algorithm) -> Result<()> {
        let name = "config.quant_recipe";
        let recipe = self.config.as_ref().map(|it| number(it.quant_recipe));
        match (recipe.unwrap_or(0), algorithm) {
            (0, _) => {}
            (1, _) => return Err(not_served(name, "NCCL_EP_DISP_QUANT_FWD")),
            (2, Algorithm::LowLatency) => {
                return Err(not_served(name, "NCCL_EP_DISP_QUANT_DS_FP8E3M4"));
            }
            (2, Algorithm::HighThroughput) => {
                let rule = "must be a recipe of high throughput";
                let error = refuse::argument(name, rule);
                return Err(error.got("NCCL_EP_DISP_QUANT_DS_FP8E3M4", "another one"));
            }
            (other, _) => known(name, other, 2)?,
        }
        let kind = self.info.as_ref().map(|it| number(it.recv_topk_idx_kind));
        known("layout_info.recv_topk_idx_kind", kind.unwrap_or(0), 2)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn run(&self, handle: &Handle, stream: Stream) -> Result<()> {
        let algorithm = handle.group.session.facts().algorithm;
        let direction = self.config.as_ref().map(|config| config.pass_direction);
        let is_backward = is_backward(algorithm, direction)?;
        absent("inputs.scales", self.inputs.scales, NO_SCALES)?;
        absent("outputs.scales", self.outputs.scales, NO_SCALES)?;
        // SAFETY: this function's contract.
        unsafe {
            match handle.layout {
                Layout::ExpertMajor => self.by_expert(handle, stream),
                Layout::RankMajor => self.by_rank(handle, stream),
                Layout::Flat if is_backward => self.backward(handle, stream),
                Layout::Flat => self.forward(handle, stream),
            }
        }
    }

    /// LL: whether the receive phase waits for a completion.
    fn is_staged(&self) -> bool {
        (self.config.as_ref()).is_some_and(|config| config.send_only != 0)
    }

    /// Whether received ids count over all ranks.
    fn has_global_ids(&self) -> bool {
        let kind = self.info.as_ref().map(|it| number(it.recv_topk_idx_kind));
        kind == Some(GLOBAL_IDS)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn by_expert(&self, handle: &Handle, stream: Stream) -> Result<()> {
        let Self {
            inputs,
            outputs,
            info,
            ..
        } = self;
        let rule = "must be NULL in low latency, expert-major";
        absent("inputs.topk_weights", inputs.topk_weights, rule)?;
        absent("outputs.topk_weights", outputs.topk_weights, rule)?;
        absent("outputs.topk_idx", outputs.topk_idx, rule)?;
        let info = info.as_ref();
        let info =
            info.ok_or_else(|| refuse::argument("layout_info", "is required in low latency"))?;
        absent(
            "layout_info.src_rank_counters",
            info.src_rank_counters,
            rule,
        )?;
        // SAFETY: this function's contract.
        let (tokens, out, counter) = unsafe {
            let tokens = tensor::required("inputs.tokens", inputs.tokens)?;
            let out = tensor::required("outputs.tokens", outputs.tokens)?;
            let counter = info.expert_counters;
            (
                tokens,
                out,
                tensor::required("layout_info.expert_counters", counter)?,
            )
        };
        let experts = handle.group.session.facts().local_experts();
        let tensors = DispatchTensors {
            tokens: Some(&tokens),
            out_tokens: Some(&first(&out, experts)),
            counter: Some(&first(&counter, experts)),
            ..DispatchTensors::default()
        };
        handle
            .core
            .dispatch(&tensors, self.is_staged(), stream)
            .map(drop)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn by_rank(&self, handle: &Handle, stream: Stream) -> Result<()> {
        let Self {
            inputs,
            outputs,
            info,
            ..
        } = self;
        let counter = match info {
            None => std::ptr::null_mut(),
            Some(info) => {
                let name = "layout_info.expert_counters";
                absent(name, info.expert_counters, "must be NULL, rank-major")?;
                info.src_rank_counters
            }
        };
        // SAFETY: this function's contract.
        let (tokens, weights, counter) = unsafe {
            (
                tensor::required("inputs.tokens", inputs.tokens)?,
                tensor::required("inputs.topk_weights", inputs.topk_weights)?,
                tensor::optional("layout_info.src_rank_counters", counter)?,
            )
        };
        // SAFETY: as above.
        let out = unsafe { Received::read(outputs) }?;
        let ranks = handle.group.session.facts().ranks;
        let counter = counter.map(|counter| first(&counter, ranks));
        let tensors = DispatchTensors {
            tokens: Some(&tokens),
            weights: Some(&weights),
            out_tokens: Some(&first(&out.tokens, ranks)),
            out_ids: Some(&first(&out.ids, ranks)),
            out_weights: Some(&first(&out.weights, ranks)),
            counter: counter.as_ref(),
            global_ids: self.has_global_ids(),
            ..DispatchTensors::default()
        };
        handle
            .core
            .dispatch(&tensors, self.is_staged(), stream)
            .map(drop)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn forward(&self, handle: &Handle, stream: Stream) -> Result<()> {
        let inputs = &self.inputs;
        // SAFETY: this function's contract.
        let (tokens, weights, mut out) = unsafe {
            (
                tensor::required("inputs.tokens", inputs.tokens)?,
                tensor::required("inputs.topk_weights", inputs.topk_weights)?,
                Received::read(&self.outputs)?,
            )
        };
        out.check_rows(handle, stream)?;
        let tensors = DispatchTensors {
            tokens: Some(&tokens),
            weights: Some(&weights),
            out_tokens: Some(&out.tokens),
            out_ids: Some(&out.ids),
            out_weights: Some(&out.weights),
            global_ids: self.has_global_ids(),
            ..DispatchTensors::default()
        };
        handle.core.dispatch(&tensors, false, stream).map(drop)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn backward(&self, handle: &Handle, stream: Stream) -> Result<()> {
        let Self {
            inputs, outputs, ..
        } = self;
        let rule = "must be NULL in a backward pass";
        absent("inputs.topk_weights", inputs.topk_weights, rule)?;
        absent("outputs.topk_weights", outputs.topk_weights, rule)?;
        absent("outputs.topk_idx", outputs.topk_idx, rule)?;
        // SAFETY: this function's contract.
        let (tokens, mut out) = unsafe {
            (
                tensor::required("inputs.tokens", inputs.tokens)?,
                tensor::required("outputs.tokens", outputs.tokens)?,
            )
        };
        check_rows(handle, stream, &mut [("outputs.tokens", &mut out)])?;
        let tensors = DispatchTensors {
            tokens: Some(&tokens),
            out_tokens: Some(&out),
            ..DispatchTensors::default()
        };
        handle.core.dispatch(&tensors, false, stream).map(drop)
    }
}

/// The tensors of received rows.
struct Received {
    tokens: Tensor,
    weights: Tensor,
    ids: Tensor,
}

impl Received {
    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn read(outputs: &ncclEpDispatchOutputs_t) -> Result<Self> {
        // SAFETY: this function's contract.
        unsafe {
            Ok(Self {
                tokens: tensor::required("outputs.tokens", outputs.tokens)?,
                weights: tensor::required("outputs.topk_weights", outputs.topk_weights)?,
                ids: tensor::required("outputs.topk_idx", outputs.topk_idx)?,
            })
        }
    }

    /// As [`check_rows`], for all of them.
    fn check_rows(&mut self, handle: &Handle, stream: Stream) -> Result<()> {
        let all = &mut [
            ("outputs.tokens", &mut self.tokens),
            ("outputs.topk_weights", &mut self.weights),
            ("outputs.topk_idx", &mut self.ids),
        ];
        check_rows(handle, stream, all)?;
        let is_empty = rows(&self.tokens) == 0;
        for tensor in [&self.weights, &self.ids] {
            if (rows(tensor) == 0) != is_empty {
                let rule = "must be 0 with outputs.tokens and outputs.topk_idx, or not with them";
                return Err(refuse::argument("outputs.topk_weights.sizes[0]", rule)
                    .got(rows(&self.weights), "all of them empty, or none"));
            }
        }
        Ok(())
    }
}

/// Refuses HT tensors without room for the group's bound of rows, or for those that come, and leaves what is beyond the
/// bound alone.
fn check_rows(handle: &Handle, stream: Stream, all: &mut [(&str, &mut Tensor)]) -> Result<()> {
    let group = &handle.group;
    let (least, what) = match group.kept.recv_rows {
        Some(bound) => (bound, "the group's max_recv_tokens_per_rank"),
        None => {
            if group.session.device().is_captured(stream)? {
                let text =
                    "stream: must not be captured in a group without max_recv_tokens_per_rank";
                return Err(Error::new(Code::InvalidUsage, text));
            }
            // What only the device knows it checks.
            let rows = handle.core.rows_if_known()?.unwrap_or(0);
            (rows, "all rows that this rank receives")
        }
    };
    for (name, tensor) in all {
        if rows(tensor) < least {
            let rule = format_args!("must have room for {what}");
            return Err(refuse::argument(format_args!("{name}.sizes[0]"), rule)
                .got(rows(tensor), format_args!("{least} or more")));
        }
        if group.kept.recv_rows.is_some() {
            **tensor = first(tensor, least);
        }
    }
    Ok(())
}

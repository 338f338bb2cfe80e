//! Dispatch.
#![allow(unsafe_code)]

use crate::enums::ncclEpExpertIdKind_t;
use crate::objects::{Handle, Layout, on_handle};
use crate::read::{self, is_backward, known, number};
use crate::received::{Received, Room, check_emptiness};
use crate::recipe::{Recipe, Scales};
use crate::routing;
use crate::tensor::{self, absent, first, rows};
use crate::types::{
    cudaStream_t, ncclEpDispatchConfig_t, ncclEpDispatchInputs_t, ncclEpDispatchOutputs_t, ncclEpHandle_t,
    ncclEpLayoutInfo_t, ncclResult_t,
};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::group::Algorithm;
use nccl_ep_core::model::ops::{RoutingCounters, Stream};
use nccl_ep_core::rule::DispatchTensors;

const GLOBAL_IDS: u32 = ncclEpExpertIdKind_t::NCCL_EP_EXPERT_ID_GLOBAL as u32;

/// A dispatch, as the caller passed it.
struct Dispatch {
    inputs: ncclEpDispatchInputs_t,
    outputs: ncclEpDispatchOutputs_t,
    info: Option<ncclEpLayoutInfo_t>,
    config: Option<ncclEpDispatchConfig_t>,
}

/// Sends each token to the ranks that host its experts. Collective: every rank of the group calls it, in the same order
/// of operations. Enqueued on `stream`; the host does not wait, except in HT without a bound of received rows and, over
/// several nodes, on an HT handle in the caller's memory and in the first operation of an LL handle.
///
/// R ranks, L local experts, M max_dispatch_tokens_per_rank, T this rank's tokens, K top-k, H hidden size. Rows are of
/// any type, a multiple of 16 bytes and at most max_token_bytes.
///
/// LL expert-major: inputs tokens [T, H]; outputs tokens [L, R*M, H], or longer in the first extent; layout_info
/// expert_counters int32 `[L]` or longer, required. The rows of each expert are packed from slot 0, by source rank,
/// token, k; the counter gets their number. Other slots keep their content. If a token repeats an expert, it takes a
/// slot each time; if an expert's rows then exceed its R*M slots, the group fails.
///
/// LL rank-major: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [R, M, H], topk_idx int32 or int64
/// and topk_weights float32 [R, M, K]; layout_info src_rank_counters int32 `[R]`, may be NULL. A rank receives a token
/// once; the rows of each source rank are packed from slot 0, by token. The ids of a row keep their k, and are -1 where
/// the expert is on another rank. In all other slots ids are -1; rows and weights keep their content.
///
/// HT flat: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [n, H], topk_idx int64 [n, K],
/// topk_weights float32 [n, K], where n is at least the group's max_recv_tokens_per_rank, B; only the first B rows are
/// used. A rank receives a token once; rows are ordered by source rank and token. The ids of a row are local expert
/// ids, ascending, then -1; its weights are in the same order, then 0. If a token repeats an expert, the id is there
/// once, with the sum of its weights, added in fp32 by ascending k. In unused rows up to B, ids are -1, weights are 0,
/// and tokens keep their content. More rows than B are a failure of the group or, with `NCCL_EP_OVERFLOW_DROP`, are
/// dropped. In a backward pass there are tokens only.
///
/// HT expert-major: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [n, H] and topk_weights float32
/// `[n]`, of whose n slots the first B are used; layout_info may be NULL, and has counters as for `ncclEpUpdateHandle`.
/// Each row is in one slot for every local expert that its token names. Slots are ordered by expert, source rank and
/// token. Each expert's slots begin at a multiple of the alignment, and zeros fill up the space behind them: together,
/// the expert's zone. Behind all zones, tokens keep their content, and weights are 0 up to B. More slots than B are a
/// failure of the group or, with `NCCL_EP_OVERFLOW_DROP`, are dropped. In a backward pass there are tokens only.
///
/// HT without B: n is at least what comes. Rows, scales and, expert-major, weights may each be longer; all are empty or
/// none is.
///
/// Recipes: with `NCCL_EP_DISP_QUANT_FWD`, inputs scales [T, S] travel with their rows, to outputs scales [.., S] that
/// lie as the rows do; rows and scales are multiples of 16 bytes and together at most max_token_bytes. With
/// `NCCL_EP_DISP_QUANT_DS_FP8E3M4`, in LL, bfloat16 rows of a multiple of 512 elements are cast to float8e4m3, with
/// outputs scales float32 [.., H/128].
///
/// Delivered ids are local, or global if layout_info says so.
///
/// @param handle       the routing
/// @param inputs       tensors that are read
/// @param outputs      tensors that are written
/// @param layout_info  LL expert-major: required. Elsewhere: may be NULL
/// @param config       may be NULL
/// @param stream       stream to run on
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that is missing or breaks a rule;
/// `ncclInvalidUsage` for a handle without a routing or whose group was destroyed, while a staged operation of the
/// handle waits for completion, for a third staged operation of the group, for a backward pass in LL, for a captured
/// stream in HT without B or, over several nodes, on an HT handle in the caller's memory, and for a tensor without data
/// in a window of an NCCL before 2.29; the code of the failure if the group has failed.
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
    on_handle("ncclEpDispatch", handle, |handle| {
        // SAFETY: this function's contract.
        unsafe {
            let call = Dispatch {
                inputs: read::required("inputs", inputs)?,
                outputs: read::required("outputs", outputs)?,
                info: read::optional("layout_info", layout_info)?,
                config: read::optional("config", config)?,
            };
            let recipe = call.check(handle.group.session.facts().algorithm)?;
            call.run(&handle, recipe, Stream(stream as usize))
        }
    })
}

impl Dispatch {
    /// Checks numeric options except for the direction; returns the recipe.
    fn check(&self, algorithm: Algorithm) -> Result<Recipe> {
        let recipe = self.config.as_ref().map(|it| number(it.quant_recipe));
        let recipe = Recipe::of(recipe.unwrap_or(0), algorithm)?;
        let kind = self.info.as_ref().map(|it| number(it.recv_topk_idx_kind));
        known("layout_info.recv_topk_idx_kind", kind.unwrap_or(0), 2)?;
        Ok(recipe)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn run(&self, handle: &Handle, recipe: Recipe, stream: Stream) -> Result<()> {
        let algorithm = handle.group.session.facts().algorithm;
        let direction = self.config.as_ref().map(|config| config.pass_direction);
        let is_backward = is_backward(algorithm, direction)?;
        let round = self.config.as_ref().map_or(0, |config| config.round_scales);
        // SAFETY: this function's contract.
        unsafe {
            let scales = &recipe.scales(&handle.group, (&self.inputs, &self.outputs), round)?;
            match handle.layout {
                Layout::ExpertMajor => self.by_expert(handle, scales, stream),
                Layout::RankMajor => self.by_rank(handle, scales, stream),
                Layout::Flat | Layout::Zones(_) if is_backward => self.backward(handle, scales, stream),
                Layout::Flat => self.forward(handle, scales, stream),
                Layout::Zones(_) => self.forward_by_expert(handle, scales, stream),
            }
        }
    }

    /// LL: whether the receive phase is left to a completion.
    fn is_staged(&self) -> bool {
        (self.config.as_ref()).is_some_and(|config| config.send_only != 0)
    }

    /// Whether received ids number the experts of all ranks.
    fn has_global_ids(&self) -> bool {
        let kind = self.info.as_ref().map(|it| number(it.recv_topk_idx_kind));
        kind == Some(GLOBAL_IDS)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn by_expert(&self, handle: &Handle, scales: &Scales, stream: Stream) -> Result<()> {
        let Self { inputs, outputs, info, .. } = self;
        let rule = "must be NULL in low latency, expert-major";
        absent("inputs.topk_weights", inputs.topk_weights, rule)?;
        absent("outputs.topk_weights", outputs.topk_weights, rule)?;
        absent("outputs.topk_idx", outputs.topk_idx, rule)?;
        let info = info.as_ref();
        let info = info.ok_or_else(|| refuse::argument("layout_info", "is required in low latency"))?;
        absent("layout_info.src_rank_counters", info.src_rank_counters, rule)?;
        // SAFETY: this function's contract.
        let (tokens, out, counter) = unsafe {
            let tokens = tensor::required(&handle.group, "inputs.tokens", inputs.tokens)?;
            let out = tensor::required(&handle.group, "outputs.tokens", outputs.tokens)?;
            let counter = info.expert_counters;
            (tokens, out, tensor::required(&handle.group, "layout_info.expert_counters", counter)?)
        };
        let experts = handle.group.session.facts().local_experts();
        let out = first(&out, experts);
        let out_scales = scales.out.map(|out| first(&out, experts));
        let tensors = DispatchTensors {
            counter: Some(&first(&counter, experts)),
            ..scales.of_rows(&tokens, &out, out_scales.as_ref())
        };
        handle.core.dispatch(&tensors, self.is_staged(), stream).map(drop)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn by_rank(&self, handle: &Handle, scales: &Scales, stream: Stream) -> Result<()> {
        let Self { inputs, outputs, info, .. } = self;
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
                tensor::required(&handle.group, "inputs.tokens", inputs.tokens)?,
                tensor::required(&handle.group, "inputs.topk_weights", inputs.topk_weights)?,
                tensor::optional(&handle.group, "layout_info.src_rank_counters", counter)?,
            )
        };
        // SAFETY: as above.
        let out = unsafe { Received::read(&handle.group, outputs) }?;
        let ranks = handle.group.session.facts().ranks;
        let counter = counter.map(|counter| first(&counter, ranks));
        let out_rows = first(&out.tokens, ranks);
        let out_scales = scales.out.map(|out| first(&out, ranks));
        let tensors = DispatchTensors {
            weights: Some(&weights),
            out_ids: Some(&first(&out.ids, ranks)),
            out_weights: Some(&first(&out.weights, ranks)),
            counter: counter.as_ref(),
            global_ids: self.has_global_ids(),
            ..scales.of_rows(&tokens, &out_rows, out_scales.as_ref())
        };
        handle.core.dispatch(&tensors, self.is_staged(), stream).map(drop)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn forward(&self, handle: &Handle, scales: &Scales, stream: Stream) -> Result<()> {
        let inputs = &self.inputs;
        // SAFETY: this function's contract.
        let (tokens, weights, mut out) = unsafe {
            (
                tensor::required(&handle.group, "inputs.tokens", inputs.tokens)?,
                tensor::required(&handle.group, "inputs.topk_weights", inputs.topk_weights)?,
                Received::read(&handle.group, &self.outputs)?,
            )
        };
        let room = Room::of(handle, stream)?;
        out.check(room)?;
        let out_scales = room.of_scales(scales, &mut out.tokens)?;
        let tensors = DispatchTensors {
            weights: Some(&weights),
            out_ids: Some(&out.ids),
            out_weights: Some(&out.weights),
            global_ids: self.has_global_ids(),
            ..scales.of_rows(&tokens, &out.tokens, out_scales.as_ref())
        };
        handle.core.dispatch(&tensors, false, stream).map(drop)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn forward_by_expert(&self, handle: &Handle, scales: &Scales, stream: Stream) -> Result<()> {
        let Self { inputs, outputs, info, .. } = self;
        let rule = "must be NULL, as each slot is of one expert";
        absent("outputs.topk_idx", outputs.topk_idx, rule)?;
        // SAFETY: this function's contract.
        let (tokens, weights, mut out, mut out_weights) = unsafe {
            (
                tensor::required(&handle.group, "inputs.tokens", inputs.tokens)?,
                tensor::required(&handle.group, "inputs.topk_weights", inputs.topk_weights)?,
                tensor::required(&handle.group, "outputs.tokens", outputs.tokens)?,
                tensor::required(&handle.group, "outputs.topk_weights", outputs.topk_weights)?,
            )
        };
        let counters = match info {
            // SAFETY: as above.
            Some(info) => unsafe { routing::counters(&handle.group, info, Some(handle.layout)) }?,
            None => RoutingCounters::default(),
        };
        let room = Room::of(handle, stream)?;
        room.check(&mut [("outputs.tokens", &mut out), ("outputs.topk_weights", &mut out_weights)])?;
        check_emptiness(rows(&out), rows(&out_weights))?;
        let out_scales = room.of_scales(scales, &mut out)?;
        let tensors = DispatchTensors {
            weights: Some(&weights),
            out_weights: Some(&out_weights),
            counters,
            ..scales.of_rows(&tokens, &out, out_scales.as_ref())
        };
        handle.core.dispatch(&tensors, false, stream).map(drop)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn backward(&self, handle: &Handle, scales: &Scales, stream: Stream) -> Result<()> {
        let Self { inputs, outputs, .. } = self;
        let rule = "must be NULL in a backward pass";
        absent("inputs.topk_weights", inputs.topk_weights, rule)?;
        absent("outputs.topk_weights", outputs.topk_weights, rule)?;
        absent("outputs.topk_idx", outputs.topk_idx, rule)?;
        // SAFETY: this function's contract.
        let (tokens, mut out) = unsafe {
            (
                tensor::required(&handle.group, "inputs.tokens", inputs.tokens)?,
                tensor::required(&handle.group, "outputs.tokens", outputs.tokens)?,
            )
        };
        let room = Room::of(handle, stream)?;
        room.check(&mut [("outputs.tokens", &mut out)])?;
        let out_scales = room.of_scales(scales, &mut out)?;
        let tensors = scales.of_rows(&tokens, &out, out_scales.as_ref());
        handle.core.dispatch(&tensors, false, stream).map(drop)
    }
}

//! Dispatch.
#![allow(unsafe_code)]

use crate::enums::ncclEpExpertIdKind_t;
use crate::objects::{Handle, Layout, on_handle};
use crate::read::{self, is_backward, known};
use crate::received::{Room, Rows};
use crate::recipe::{Recipe, Scales};
use crate::routing;
use crate::tensor::{self, absent, leading};
use crate::types::{
    cudaStream_t, ncclEpDispatchConfig_t, ncclEpDispatchInputs_t, ncclEpDispatchOutputs_t, ncclEpHandle_t,
    ncclEpLayoutInfo_t, ncclResult_t,
};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::group::Algorithm;
use nccl_ep_core::model::ops::{RoutingCounters, Stream};
use nccl_ep_core::model::tensor::Tensor;
use nccl_ep_core::rule::DispatchTensors;

const EXPERTS: &str = "layout_info.expert_counters";
const RANKS: &str = "layout_info.src_rank_counters";
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
/// lie as the rows do, with B in tensors of the same first extent; rows and scales are multiples of 16 bytes and
/// together at most max_token_bytes. With `NCCL_EP_DISP_QUANT_DS_FP8E3M4`, in LL, bfloat16 rows of a multiple of 512
/// elements are cast to float8e4m3, with outputs scales float32 [.., H/128].
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
        let recipe = self.config.as_ref().map(|it| it.quant_recipe);
        let recipe = Recipe::of(recipe.unwrap_or(0), algorithm)?;
        known("layout_info.recv_topk_idx_kind", self.id_kind(), 2)?;
        Ok(recipe)
    }

    /// How received ids are numbered.
    fn id_kind(&self) -> u32 {
        self.info.as_ref().map_or(0, |it| it.recv_topk_idx_kind)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn run(&self, handle: &Handle, recipe: Recipe, stream: Stream) -> Result<()> {
        let algorithm = handle.group.session.facts().algorithm;
        let direction = self.config.as_ref().map(|config| config.pass_direction);
        let is_backward = is_backward(algorithm, direction)?;
        let round = self.config.as_ref().map_or(0, |config| config.round_scales);
        let given = (&self.inputs, &self.outputs);
        // SAFETY: this function's contract.
        unsafe {
            let scales = recipe.scales(&handle.group, given, round)?;
            let rows = Rows::read(handle, is_backward, given)?;
            match algorithm {
                Algorithm::LowLatency => self.low_latency(handle, rows, (scales, self.counter(handle)?), stream),
                Algorithm::HighThroughput => {
                    let counters = self.counters(handle, is_backward)?;
                    self.high_throughput(handle, rows, (scales, counters), stream)
                }
            }
        }
    }

    fn low_latency(
        &self,
        handle: &Handle,
        rows: Rows,
        (scales, counter): (Scales, Option<Tensor>),
        stream: Stream,
    ) -> Result<()> {
        let parts = handle.parts();
        let cut = |name: &str, tensor: Option<Tensor>| tensor.map(|it| leading(name, &it, parts)).transpose();
        let rows = Rows {
            out: leading("outputs.tokens", &rows.out, parts)?,
            out_weights: cut("outputs.topk_weights", rows.out_weights)?,
            out_ids: cut("outputs.topk_idx", rows.out_ids)?,
            ..rows
        };
        let name = if handle.layout == Layout::RankMajor { RANKS } else { EXPERTS };
        let (counter, out_scales) = (cut(name, counter)?, cut("outputs.scales", scales.out)?);
        let tensors =
            DispatchTensors { counter: counter.as_ref(), ..self.tensors(&rows, &scales, out_scales.as_ref()) };
        let is_staged = self.config.as_ref().is_some_and(|config| config.send_only != 0);
        handle.core.dispatch(&tensors, is_staged, stream).map(drop)
    }

    fn high_throughput(
        &self,
        handle: &Handle,
        mut rows: Rows,
        (scales, counters): (Scales, RoutingCounters),
        stream: Stream,
    ) -> Result<()> {
        let (room, out_rows) = (Room::of(handle, stream)?, tensor::rows(&rows.out));
        rows.check(room)?;
        let out_scales = room.of_scales(&scales, out_rows)?;
        let tensors = DispatchTensors { counters, ..self.tensors(&rows, &scales, out_scales.as_ref()) };
        handle.core.dispatch(&tensors, false, stream).map(drop)
    }

    /// What the core gets of both modes.
    fn tensors<'a>(&self, rows: &'a Rows, scales: &'a Scales, out_scales: Option<&'a Tensor>) -> DispatchTensors<'a> {
        DispatchTensors {
            tokens: Some(&rows.tokens),
            scales: scales.given.as_ref(),
            weights: rows.weights.as_ref(),
            out_tokens: Some(&rows.out),
            out_scales,
            out_ids: rows.out_ids.as_ref(),
            out_weights: rows.out_weights.as_ref(),
            round_scales: scales.round,
            global_ids: rows.out_ids.is_some() && self.id_kind() == GLOBAL_IDS,
            keeps_rest: true,
            ..DispatchTensors::default()
        }
    }

    /// LL: gets the numbers of received rows.
    ///
    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn counter(&self, handle: &Handle) -> Result<Option<Tensor>> {
        let group = &handle.group;
        match (&self.info, handle.layout) {
            (None, Layout::RankMajor) => Ok(None),
            (None, _) => Err(refuse::argument("layout_info", "is required in low latency")),
            (Some(info), Layout::RankMajor) => {
                absent(EXPERTS, info.expert_counters, "must be NULL, rank-major")?;
                // SAFETY: this function's contract.
                unsafe { tensor::optional(group, RANKS, info.src_rank_counters) }
            }
            (Some(info), _) => {
                absent(RANKS, info.src_rank_counters, "must be NULL in low latency, expert-major")?;
                // SAFETY: as above.
                unsafe { tensor::required(group, EXPERTS, info.expert_counters) }.map(Some)
            }
        }
    }

    /// HT: what a forward dispatch of rows by expert reports.
    ///
    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn counters(&self, handle: &Handle, is_backward: bool) -> Result<RoutingCounters> {
        match (&self.info, handle.layout) {
            (Some(info), Layout::Zones(_)) if !is_backward => {
                // SAFETY: this function's contract.
                unsafe { routing::counters(&handle.group, info, Some(handle.layout)) }
            }
            _ => Ok(RoutingCounters::default()),
        }
    }
}

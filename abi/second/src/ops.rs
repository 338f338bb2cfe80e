//! Dispatch, combine and completion.
#![allow(unsafe_code)]

use crate::guard::{Subject, guard};
use crate::objects::{self, Handle};
use crate::read::{self, number};
use crate::settings::known;
use crate::tensor::{self, absent, first, rows};
use crate::texts::not_served;
use crate::types::{
    cudaStream_t, ncclEpCombineConfig_t, ncclEpCombineInputs_t, ncclEpCombineOutputs_t,
    ncclEpCompleteConfig_t, ncclEpDispatchConfig_t, ncclEpDispatchInputs_t,
    ncclEpDispatchOutputs_t, ncclEpHandle_t, ncclEpLayoutInfo_t, ncclResult_t,
};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::group::Algorithm;
use nccl_ep_core::model::ops::Stream;
use nccl_ep_core::model::tensor::Tensor;
use nccl_ep_core::rule::{CombineTensors, DispatchTensors};
use std::mem::MaybeUninit;

const NO_SCALES: &str = "must be NULL, as the recipe has no scales";

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
/// HT flat: inputs tokens [T, H], topk_weights float32 [T, K]; outputs tokens [n, H], topk_idx int64 [n, K], topk_weights
/// float32 [n, K], where n is at least the group's max_recv_tokens_per_rank, B, of which the first B rows are used. A rank
/// receives a token once; rows are ordered by source rank and token. The ids of a
/// row are local expert ids, ascending, then -1; its weights are in the same order, then 0. An
/// expert that a token names more than once is there once, with the sum of its weights, in fp32 by
/// ascending k. Unused rows up to B are 0, -1 and 0. More rows than B are a failure of the group.
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
    guard("ncclEpDispatch", subject, || {
        let handle = objects::handle(handle as usize)?;
        // SAFETY: this function's contract.
        unsafe {
            let call = Dispatch {
                inputs: read::required("inputs", inputs)?,
                outputs: read::required("outputs", outputs)?,
                info: read::optional("layout_info", layout_info)?,
                config: read::optional("config", config)?,
            };
            call.check()?;
            call.run(&handle, Stream(stream as usize))
        }
    })
}

impl Dispatch {
    /// Checks the recipe and the direction.
    fn check(&self) -> Result<()> {
        let Some(config) = &self.config else {
            return Ok(());
        };
        let recipe = number(config.quant_recipe);
        known("config.quant_recipe", recipe, 2)?;
        if recipe != 0 {
            return Err(not_served(
                "config.quant_recipe",
                "NCCL_EP_DISP_QUANT_FWD or _DS_FP8E3M4",
            ));
        }
        Ok(())
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn run(&self, handle: &Handle, stream: Stream) -> Result<()> {
        let algorithm = handle.group.session.facts().algorithm;
        forward(
            algorithm,
            self.config.as_ref().map(|config| config.pass_direction),
        )?;
        absent("inputs.scales", self.inputs.scales, NO_SCALES)?;
        absent("outputs.scales", self.outputs.scales, NO_SCALES)?;
        // SAFETY: this function's contract.
        unsafe {
            match algorithm {
                Algorithm::LowLatency => self.low_latency(handle, stream),
                Algorithm::HighThroughput => self.high_throughput(handle, stream),
            }
        }
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn low_latency(&self, handle: &Handle, stream: Stream) -> Result<()> {
        let Self {
            inputs,
            outputs,
            info,
            config,
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
        let staged = config.as_ref().is_some_and(|config| config.send_only != 0);
        handle.core.dispatch(&tensors, staged, stream)
    }

    /// # Safety
    /// As of [`ncclEpDispatch`].
    unsafe fn high_throughput(&self, handle: &Handle, stream: Stream) -> Result<()> {
        let Self {
            inputs,
            outputs,
            info,
            ..
        } = self;
        if let Some(info) = info {
            let kind = number(info.recv_topk_idx_kind);
            known("layout_info.recv_topk_idx_kind", kind, 2)?;
            if kind == 2 {
                let what = "NCCL_EP_EXPERT_ID_GLOBAL";
                return Err(not_served("layout_info.recv_topk_idx_kind", what));
            }
        }
        // SAFETY: this function's contract.
        let (tokens, weights, mut out) = unsafe {
            let tokens = tensor::required("inputs.tokens", inputs.tokens)?;
            let weights = tensor::required("inputs.topk_weights", inputs.topk_weights)?;
            let out = Received {
                tokens: tensor::required("outputs.tokens", outputs.tokens)?,
                weights: tensor::required("outputs.topk_weights", outputs.topk_weights)?,
                ids: tensor::required("outputs.topk_idx", outputs.topk_idx)?,
            };
            (tokens, weights, out)
        };
        out.check_rows(handle, stream)?;
        let ids = *handle.ids.lock();
        let tensors = DispatchTensors {
            tokens: Some(&tokens),
            ids: ids.as_ref(),
            weights: Some(&weights),
            out_tokens: Some(&out.tokens),
            out_ids: Some(&out.ids),
            out_weights: Some(&out.weights),
            ..DispatchTensors::default()
        };
        handle.core.dispatch(&tensors, false, stream)
    }
}

/// The tensors of received rows in HT.
struct Received {
    tokens: Tensor,
    weights: Tensor,
    ids: Tensor,
}

impl Received {
    /// Refuses tensors without room for the group's bound of rows, or for those that come, and leaves what is beyond the
    /// bound alone.
    fn check_rows(&mut self, handle: &Handle, stream: Stream) -> Result<()> {
        let group = &handle.group;
        let (least, what) = match group.kept.recv_rows {
            Some(bound) => (bound, "the group's max_recv_tokens_per_rank"),
            None => {
                if group.session.device().is_captured(stream)? {
                    let text =
                        "stream: must not be captured in a group without max_recv_tokens_per_rank";
                    return Err(Error::new(Code::InvalidUsage, text));
                }
                (
                    handle.core.received_rows()?,
                    "all rows that this rank receives",
                )
            }
        };
        let all = [
            ("outputs.tokens", &mut self.tokens),
            ("outputs.topk_weights", &mut self.weights),
            ("outputs.topk_idx", &mut self.ids),
        ];
        for (name, tensor) in all {
            if rows(tensor) < least {
                let rule = format_args!("must have room for {what}");
                return Err(refuse::argument(format_args!("{name}.sizes[0]"), rule)
                    .got(rows(tensor), format_args!("{least} or more")));
            }
            if group.kept.recv_rows.is_some() {
                *tensor = first(tensor, least);
            }
        }
        Ok(())
    }
}

/// Refuses other passes than forward.
fn forward<E: Copy>(algorithm: Algorithm, direction: Option<MaybeUninit<E>>) -> Result<()> {
    let name = "config.pass_direction";
    let direction = direction.map_or(0, number);
    known(name, direction, 1)?;
    match (direction, algorithm) {
        (0, _) => Ok(()),
        (_, Algorithm::HighThroughput) => Err(not_served(name, "NCCL_EP_BWD_PASS")),
        (_, Algorithm::LowLatency) => {
            let text = "config.pass_direction: must be NCCL_EP_FWD_PASS in low latency";
            Err(Error::new(Code::InvalidUsage, text))
        }
    }
}

/// Sends the experts' results back to the tokens' home ranks, summed in fp32 in an order that is
/// always the same. Every rank of the group calls it, in the same order of operations. Enqueued on
/// `stream`; rows are bfloat16, float16 or float32.
///
/// LL expert-major: inputs tokens [L, R*M, H] or longer in the first extent, rows where dispatch put their tokens; outputs
/// topk_weights float32 [T, K], which is read, and tokens [T, H]: for each token the weighted sum over its experts. A rank
/// that hosts several experts of a token sums their rows by ascending k, rounds the
/// sum and sends that; on one node the home rank sums by ascending rank. With
/// NCCL_EP_LL_COMBINE=exact, on one node only, the home rank sums all rows, by ascending k, and nothing is rounded in
/// between.
///
/// HT flat: inputs tokens [n, H], in dispatch's order, where the caller has applied the weights
/// and summed the local experts of each token; outputs tokens [T, H]: the sum over ranks, on one
/// node ascending.
///
/// A token to which no expert contributes gets zeros.
///
/// @param handle   the routing; LL: after a dispatch on it
/// @param inputs   tensors that are read
/// @param outputs  tensors that are written
/// @param config   may be NULL
/// @param stream   stream to run on
///
/// Returns as `ncclEpDispatch`, and `ncclInvalidUsage` for an LL handle without a dispatch.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpCombine(
    handle: ncclEpHandle_t,
    inputs: *const ncclEpCombineInputs_t,
    outputs: *const ncclEpCombineOutputs_t,
    config: *const ncclEpCombineConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let subject = Subject::Handle(handle as usize);
    guard("ncclEpCombine", subject, || {
        let handle = objects::handle(handle as usize)?;
        // SAFETY: this function's contract.
        unsafe {
            let config = read::optional("config", config)?;
            combine_recipe(config.as_ref())?;
            let inputs = read::required("inputs", inputs)?;
            let outputs = read::required("outputs", outputs)?;
            combine(
                &handle,
                (&inputs, &outputs),
                config.as_ref(),
                Stream(stream as usize),
            )
        }
    })
}

fn combine_recipe(config: Option<&ncclEpCombineConfig_t>) -> Result<()> {
    let name = "config.quant_recipe";
    match config.map_or(0, |config| number(config.quant_recipe)) {
        0 => Ok(()),
        1 => Err(not_served(name, "NCCL_EP_COMB_QUANT_NVFP4")),
        2 => Err(not_served(name, "NCCL_EP_COMB_QUANT_MXFP8")),
        other => known(name, other, 2),
    }
}

/// # Safety
/// As of [`ncclEpCombine`].
unsafe fn combine(
    handle: &Handle,
    (inputs, outputs): (&ncclEpCombineInputs_t, &ncclEpCombineOutputs_t),
    config: Option<&ncclEpCombineConfig_t>,
    stream: Stream,
) -> Result<()> {
    let facts = handle.group.session.facts();
    forward(facts.algorithm, config.map(|config| config.pass_direction))?;
    absent("inputs.scales", inputs.scales, NO_SCALES)?;
    let is_ll = facts.algorithm == Algorithm::LowLatency;
    if !is_ll {
        let rule = "must be NULL in a forward pass";
        absent("inputs.topk_weights", inputs.topk_weights, rule)?;
    }
    // SAFETY: this function's contract.
    let tokens = unsafe { tensor::required("inputs.tokens", inputs.tokens) }?;
    if let Some(dtype) = tokens.dtype.filter(|dtype| !dtype.is_summable()) {
        let rule = "a combine sums bfloat16, float16 or float32";
        return Err(refuse::argument("inputs.tokens.datatype", rule).got(dtype, "one of them"));
    }
    // SAFETY: as above.
    let (out, weights) = unsafe {
        let out = tensor::required("outputs.tokens", outputs.tokens)?;
        let weights = match is_ll {
            true => Some(tensor::required(
                "outputs.topk_weights",
                outputs.topk_weights,
            )?),
            false => None,
        };
        (out, weights)
    };
    let tensors = CombineTensors {
        tokens: Some(&if is_ll {
            first(&tokens, facts.local_experts())
        } else {
            tokens
        }),
        token_weights: weights.as_ref(),
        out_tokens: Some(&out),
        ..CombineTensors::default()
    };
    let staged = is_ll && config.is_some_and(|config| config.send_only != 0);
    handle.core.combine(&tensors, staged, stream)
}

/// Enqueues the receive phase of the handle's staged operation on `stream`. It runs after the send
/// phase, even if that was enqueued on another stream. A successful no-op if nothing is staged,
/// and in HT.
///
/// Two staged operations of a group may be pending at once. Before a third is sent, all ranks
/// complete the same one of them, or destroy its handle.
///
/// @param handle  the handle
/// @param config  may be NULL
/// @param stream  stream to run on
///
/// Returns `ncclInvalidArgument` for a NULL or dead handle; `ncclInvalidUsage` for a handle whose
/// group was destroyed, or if `stream` is not captured into the same graph as the send phase; or
/// the code of the failure if the group has failed.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpComplete(
    handle: ncclEpHandle_t,
    config: *const ncclEpCompleteConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let subject = Subject::Handle(handle as usize);
    guard("ncclEpComplete", subject, || {
        let handle = objects::handle(handle as usize)?;
        // SAFETY: this function's contract.
        unsafe { read::optional("config", config) }?;
        handle.core.complete(Stream(stream as usize))
    })
}

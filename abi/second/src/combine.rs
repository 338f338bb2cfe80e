//! Combine and completion.
#![allow(unsafe_code)]

use crate::guard::{GUARD, Subject};
use crate::objects::{self, Handle};
use crate::options::{NO_SCALES, forward, known};
use crate::read::{self, number};
use crate::tensor::{self, absent, first};
use crate::texts::not_served;
use crate::types::{
    cudaStream_t, ncclEpCombineConfig_t, ncclEpCombineInputs_t, ncclEpCombineOutputs_t,
    ncclEpCompleteConfig_t, ncclEpHandle_t, ncclResult_t,
};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::group::Algorithm;
use nccl_ep_core::model::ops::Stream;
use nccl_ep_core::rule::CombineTensors;

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
    GUARD.run("ncclEpCombine", subject, || {
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
    GUARD.run("ncclEpComplete", subject, || {
        let handle = objects::handle(handle as usize)?;
        // SAFETY: this function's contract.
        unsafe { read::optional("config", config) }?;
        handle.core.complete(Stream(stream as usize))
    })
}

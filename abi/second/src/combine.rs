//! Combine and completion.
#![allow(unsafe_code)]

use crate::objects::{Handle, Layout, on_handle};
use crate::read::{self, NO_SCALES, is_backward, known};
use crate::tensor::{self, absent, leading, rows};
use crate::texts::not_served;
use crate::types::{
    cudaStream_t, ncclEpCombQuant_t, ncclEpCombineConfig_t, ncclEpCombineInputs_t, ncclEpCombineOutputs_t,
    ncclEpCompleteConfig_t, ncclEpHandle_t, ncclResult_t,
};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::group::Algorithm;
use nccl_ep_core::model::ops::Stream;
use nccl_ep_core::model::tensor::Tensor;
use nccl_ep_core::rule::CombineTensors;

/// Sends the experts' results back to the tokens' home ranks and sums them, in fp32 and always in the same order.
/// Collective: every rank of the group calls it, in the same order of operations. Enqueued on `stream`. Rows are
/// bfloat16, float16 or float32. A token to which no expert contributes gets zeros.
///
/// LL expert-major: inputs tokens [L, R*M, H] or longer in the first extent, rows where dispatch put their tokens;
/// outputs topk_weights float32 [T, K], which is read, and tokens [T, H]: for each token the weighted sum over its
/// experts, on one node by ascending k, with one rounding at the end. With NCCL_EP_LL_COMBINE=reduce, and over several
/// nodes, a rank that hosts several experts of a token sums their rows by ascending k, rounds the sum and sends that;
/// the home rank sums by ascending rank.
///
/// LL rank-major: inputs tokens [R, M, H], rows where dispatch put their tokens, each the sum of what the rank's
/// experts contribute; outputs tokens [T, H]: the sum of one row from each rank, in the order of the first k that names
/// it. Weights are not read.
///
/// HT flat: inputs tokens [n, H], in dispatch's order, where the caller has applied the weights and summed the local
/// experts of each token; outputs tokens [T, H]: the sum over ranks, on one node by ascending rank. A backward pass
/// also has inputs topk_weights float32 [n, K], gradients packed as dispatch delivers weights, and outputs topk_weights
/// [T, K]: the gradient of each id, zero if it names no expert.
///
/// HT expert-major: inputs tokens [n, H], in dispatch's slots, where the caller has applied the weights; outputs tokens
/// [T, H]. Each rank sums a token's slots by ascending expert and rounds; the sum is over ranks, ascending. In a
/// backward pass, gradients among the inputs are `[n]`.
///
/// @param handle   the routing; LL: after a dispatch on it since its last update
/// @param inputs   tensors that are read
/// @param outputs  tensors that are written
/// @param config   may be NULL
/// @param stream   stream to run on
///
/// Returns as `ncclEpDispatch`, and `ncclInvalidUsage` for an LL handle without such a dispatch, in HT without
/// max_recv_tokens_per_rank for fewer rows than the dispatch has counted, and for a recipe that is not served yet.
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
    on_handle("ncclEpCombine", handle, |handle| {
        // SAFETY: this function's contract.
        unsafe {
            let config = read::optional("config", config)?;
            let recipe = config.as_ref().map_or(0, |config| config.quant_recipe);
            if recipe == NVFP4 {
                return Err(not_served(RECIPE, "NCCL_EP_COMB_QUANT_NVFP4"));
            }
            let inputs = read::required("inputs", inputs)?;
            let outputs = read::required("outputs", outputs)?;
            check_recipe(recipe, handle.layout)?;
            combine(&handle, (&inputs, &outputs), config.as_ref(), Stream(stream as usize))
        }
    })
}

const RECIPE: &str = "config.quant_recipe";
const NVFP4: u32 = ncclEpCombQuant_t::NCCL_EP_COMB_QUANT_NVFP4 as u32;
const MXFP8: u32 = ncclEpCombQuant_t::NCCL_EP_COMB_QUANT_MXFP8 as u32;

fn check_recipe(recipe: u32, layout: Layout) -> Result<()> {
    match (recipe, layout) {
        (0, _) => Ok(()),
        (MXFP8, Layout::Zones(_)) => Err(not_served(RECIPE, "NCCL_EP_COMB_QUANT_MXFP8")),
        (MXFP8, _) => Err(refuse::argument(RECIPE, "must be a recipe of the layout")
            .got("NCCL_EP_COMB_QUANT_MXFP8", "NCCL_EP_COMB_QUANT_NONE")),
        (other, _) => known(RECIPE, other, MXFP8),
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
    let group = &handle.group;
    let facts = group.session.facts();
    let is_ll = facts.algorithm == Algorithm::LowLatency;
    let is_backward = is_backward(facts.algorithm, config.map(|config| config.pass_direction))?;
    absent("inputs.scales", inputs.scales, NO_SCALES)?;
    // SAFETY: this function's contract.
    let required = |name, raw| unsafe { tensor::required(group, name, raw) };
    let name = "inputs.topk_weights";
    let gradients_in = match (is_backward, is_ll) {
        (true, _) => Some(required(name, inputs.topk_weights)?),
        (false, false) => absent(name, inputs.topk_weights, "must be NULL in a forward pass").map(|()| None)?,
        (false, true) => None,
    };
    let tokens = required("inputs.tokens", inputs.tokens)?;
    if let Some(dtype) = tokens.dtype.filter(|dtype| !dtype.is_summable()) {
        let rule = "a combine sums bfloat16, float16 or float32";
        return Err(refuse::argument("inputs.tokens.datatype", rule).got(dtype, "one of them"));
    }
    let out = required("outputs.tokens", outputs.tokens)?;
    // Elsewhere the caller has applied the weights. NVIDIA's library ignores the field there, too.
    let has_weights = is_backward || handle.layout == Layout::ExpertMajor;
    let weights = has_weights.then(|| required("outputs.topk_weights", outputs.topk_weights)).transpose()?;
    let (token_weights, gradients) = if is_backward { (None, weights) } else { (weights, None) };
    let tokens = if is_ll { leading("inputs.tokens", &tokens, handle.parts())? } else { tokens };
    if let Some(gradients) = &gradients_in {
        both_or_neither(&tokens, gradients)?;
    }
    let tensors = CombineTensors {
        tokens: Some(&tokens),
        weights: gradients_in.as_ref(),
        token_weights: token_weights.as_ref(),
        out_tokens: Some(&out),
        out_weights: gradients.as_ref(),
        keeps_rest: true,
        ..CombineTensors::default()
    };
    let staged = is_ll && config.is_some_and(|config| config.send_only != 0);
    handle.core.combine(&tensors, staged, stream)
}

/// Checks that rows and their gradients are both empty, or neither is.
fn both_or_neither(tokens: &Tensor, gradients: &Tensor) -> Result<()> {
    if (rows(tokens) == 0) == (rows(gradients) == 0) {
        return Ok(());
    }
    let rule = "must be 0 with inputs.tokens, or not with it";
    let refused = refuse::argument("inputs.topk_weights.sizes[0]", rule);
    Err(refused.got(rows(gradients), "both of them empty, or none"))
}

/// Enqueues the receive phase of the handle's staged operation on `stream`. It runs after the send phase, even if that
/// was enqueued on another stream. A successful no-op if nothing is staged, and in HT.
///
/// Two staged operations of a group may be pending at once. Before a third is sent, all ranks complete the same one of
/// the two, or destroy its handle.
///
/// @param handle  the handle
/// @param config  may be NULL
/// @param stream  stream to run on
///
/// Returns `ncclInvalidArgument` for a NULL or dead handle; `ncclInvalidUsage` for a handle whose group was destroyed,
/// or if `stream` is not captured into the same graph as the send phase; or the code of the failure if the group has
/// failed.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpComplete(
    handle: ncclEpHandle_t,
    config: *const ncclEpCompleteConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    on_handle("ncclEpComplete", handle, |handle| {
        // SAFETY: this function's contract.
        unsafe { read::optional("config", config) }?;
        handle.core.complete(Stream(stream as usize))
    })
}

//! Dispatch, combine and completion.
#![allow(unsafe_code)]

use crate::objects::on_handle;
use crate::read::{self, Tag, TensorSet};
use crate::types::{
    cudaStream_t, ncclEpCombineConfig_t, ncclEpCompleteConfig_t, ncclEpDispatchConfig_t, ncclEpHandle_t,
    ncclNDTensor_t, ncclResult_t,
};
use nccl_ep_core::error::Result;
use nccl_ep_core::model::ops::{RoutingCounters, Stream};
use nccl_ep_core::rule::{CombineTensors, DispatchTensors};
use nccl_ep_core::session::handle::Handle;
use std::ffi::c_uint;

/// The three tensor lists of a call, as the caller passed them.
struct RawLists {
    inputs: (*const *const ncclNDTensor_t, c_uint),
    outputs: (*const *mut ncclNDTensor_t, c_uint),
    locals: (*const *mut ncclNDTensor_t, c_uint),
}

impl RawLists {
    /// # Safety
    /// Each list whose count is not 0 is NULL or has that many entries, NULL or valid descriptors.
    unsafe fn read(&self, to: &mut Lists) -> Result<()> {
        let (inputs, outputs, locals) = (self.inputs, self.outputs, self.locals);
        // SAFETY: this function's contract.
        unsafe {
            read::tensor_set(&mut to.inputs, "inputs", inputs.0, inputs.1)?;
            read::tensor_set(&mut to.outputs, "outputs", outputs.0.cast(), outputs.1)?;
            read::tensor_set(&mut to.locals, "local_tensors", locals.0.cast(), locals.1)
        }
    }
}

/// The three lists, sorted by tag.
#[derive(Default)]
struct Lists {
    inputs: TensorSet,
    outputs: TensorSet,
    locals: TensorSet,
}

impl Lists {
    fn of_dispatch(&self, round_scales: c_uint) -> DispatchTensors<'_> {
        DispatchTensors {
            tokens: self.inputs.get(Tag::Tokens),
            scales: self.inputs.get(Tag::Scales),
            scale_strides: self.inputs.scale_strides.as_ref(),
            ids: self.inputs.get(Tag::TopkIdx),
            weights: self.inputs.get(Tag::TopkWeights),
            out_tokens: self.outputs.get(Tag::Tokens),
            out_scales: self.outputs.get(Tag::Scales),
            out_scale_strides: self.outputs.scale_strides.as_ref(),
            out_ids: self.outputs.get(Tag::TopkIdx),
            out_weights: self.outputs.get(Tag::TopkWeights),
            counter: self.locals.get(Tag::RecvExpertCounterDevice),
            round_scales,
            global_ids: false,
            keeps_rest: false,
            counters: RoutingCounters::default(),
        }
    }

    // The reference's header puts the weights of an LL combine among the local tensors, its README
    // among the inputs; the core accepts either.
    fn of_combine(&self) -> CombineTensors<'_> {
        CombineTensors {
            tokens: self.inputs.get(Tag::Tokens),
            scales: self.inputs.get(Tag::Scales),
            weights: self.inputs.get(Tag::TopkWeights),
            token_weights: self.locals.get(Tag::TopkWeights),
            out_tokens: self.outputs.get(Tag::Tokens),
            out_scales: self.outputs.get(Tag::Scales),
            out_weights: self.outputs.get(Tag::TopkWeights),
            keeps_rest: false,
        }
    }
}

/// Runs `call`, the body of the exported function `name`, with its handle and its lists.
///
/// # Safety
/// As of [`RawLists::read`].
unsafe fn operate(
    name: &'static str,
    handle: ncclEpHandle_t,
    lists: RawLists,
    call: impl FnOnce(&Handle, &Lists) -> Result<()>,
) -> ncclResult_t {
    on_handle(name, handle, |handle| {
        let mut tensors = Lists::default();
        // SAFETY: this function's contract.
        unsafe { lists.read(&mut tensors) }?;
        call(&handle, &tensors)
    })
}

/// Sends each token to the ranks that host its experts. Collective: every rank of the group calls it, in the same order
/// of operations. Enqueued on `stream`; the host does not wait, except in the first operation of an LL handle over
/// several nodes, if the other nodes have not created theirs.
///
/// A group's operations run one after the other in the order of the calls, whatever their streams. The caller orders
/// launches of graphs, among each other and with other operations. A handle must outlive the graphs that hold its
/// operations. At most four captures with operations of a group may be interleaved. A staged operation occupies one of
/// its group's two slots, a captured one in each replay. Do not launch its graph while a staged operation that was sent
/// outside of it, after the capture, waits for `ncclEpComplete`: both may wait until the deadline.
///
/// R ranks, L local experts, M max_tokens_per_rank, T this rank's tokens, K top-k, H hidden size. Rows are of any type,
/// a multiple of 16 bytes and, with their scales, at most token_size_bytes.
///
/// LL: inputs TOKENS [T, H]; outputs TOKENS [L, R*M, H]; local_tensors optional RECV_EXPERT_COUNTER_DEVICE int32 `[L]`.
/// The rows of each expert are packed from slot 0, by source rank, token, k; the counter gets their number. Other slots
/// keep their content. If a token repeats an expert, each repetition takes a slot. If repetitions bring an expert more
/// rows than its R*M slots hold, the group fails, with a text that names the expert and a rank.
///
/// LL rank-major, if outputs include TOPK_IDX: inputs TOKENS [T, H], TOPK_WEIGHTS float32 [T, K]; outputs TOKENS
/// [R, M, H], TOPK_IDX int64 [R, M, K], TOPK_WEIGHTS float32 [R, M, K]; local_tensors optional
/// RECV_EXPERT_COUNTER_DEVICE int32 `[R]`. A rank receives a token once, however many of its experts the token names.
/// The rows of each source rank are packed from row 0, by token; the counter gets their number. A row has all K weights
/// of its token; entry k of its ids is the local id of the token's expert k if that expert is on this rank, else -1. In
/// other rows all ids are -1; tokens and weights keep their content.
/// If the data of outputs TOKENS is NULL (on every rank or on none), rows stay in a view, memory of the library whose
/// address is stored there. Rows of a view that hold nothing have arbitrary content and must not be written. The view
/// lives until the handle's next combine begins (which may read it), or until the second later dispatch of the group
/// with a view begins, whichever is earlier. Only the order of the stream tells when; nothing else signals it. In
/// graphs a view has the same address in each replay.
///
/// HT forward: inputs TOKENS [T, H], TOPK_IDX int64 [T, K], TOPK_WEIGHTS float32 [T, K]; outputs TOKENS [n, H],
/// TOPK_IDX [n, K], TOPK_WEIGHTS [n, K], where n is at least the number of received tokens. A rank receives a token
/// once; rows are ordered by source rank and token. The ids of a row are local expert ids, ascending, then -1; its
/// weights are in the same order, then 0. If a token repeats an expert, the id is there once, with the sum of its
/// weights, added in fp32 by ascending k. Unused rows are 0, -1 and 0.
/// HT tokens only (cached, or the backward of a combine): inputs and outputs TOKENS.
/// In both, local_tensors may hold RECV_EXPERT_COUNTER_DEVICE int32 `[L]`.
///
/// Scales, in every form: outputs SCALES [L, R*M, S] (LL), [R, M, S] (rank-major) or [n, S] (HT); unused rows are as
/// those of TOKENS. With inputs SCALES [T, S], of a type of 1, 2 or 4 bytes, rows and scales arrive unchanged. Without,
/// the dispatch casts: TOKENS are bfloat16, float16 or float32 and arrive as float8e4m3, declared as that, uint8 or
/// int8. The type and S of outputs SCALES select the cast: float32, one for 128 elements; uint8 (UE8M0), one for 128 or
/// for 32; int32 or uint32, four UE8M0 in each. A row with its scales, padded to 16 bytes, must fit token_size_bytes.
/// SCALES may have strides: row-major (.., P, 1), P at least S, or column-major (.., 1, P), P at least the rows;
/// experts are at least P times the other extent apart. docs/formats.md has the formulas.
///
/// @param handle             the routing
/// @param inputs             tensors that are read
/// @param num_inputs         their number
/// @param outputs            tensors that are written
/// @param num_outputs        their number
/// @param local_tensors      tensors of this rank alone
/// @param num_local_tensors  their number
/// @param send_only          LL: if not 0, only send now; `ncclEpComplete` receives. The same on every rank. HT: no
///                           effect
/// @param config             may be NULL
/// @param stream             stream to run on; NULL is the default stream
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that is missing or breaks a rule;
/// `ncclInvalidUsage` for a handle whose group was destroyed, while a staged operation of the handle waits for
/// completion, or for a third staged operation of the group; the code of the failure if the group has failed. HT on the
/// GPUs of one node: `ncclRemoteError` or `ncclInvalidArgument` once it is known that another rank refused the handle
/// or has another K.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The ABI's.
pub unsafe extern "C" fn ncclEpDispatch(
    handle: ncclEpHandle_t,
    inputs: *const *const ncclNDTensor_t,
    num_inputs: c_uint,
    outputs: *const *mut ncclNDTensor_t,
    num_outputs: c_uint,
    local_tensors: *const *mut ncclNDTensor_t,
    num_local_tensors: c_uint,
    send_only: c_uint,
    config: *const ncclEpDispatchConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: this function's contract.
    let config = unsafe { config.as_ref() };
    let round_scales = config.map_or(0, |config| config.round_scales);
    let lists = RawLists {
        inputs: (inputs, num_inputs),
        outputs: (outputs, num_outputs),
        locals: (local_tensors, num_local_tensors),
    };
    // SAFETY: this function's contract.
    unsafe {
        operate("ncclEpDispatch", handle, lists, |handle, tensors| {
            let stream = Stream(stream as usize);
            let tensors = tensors.of_dispatch(round_scales);
            if let Some(view) = handle.dispatch(&tensors, send_only != 0, stream)? {
                read::set_data((outputs, num_outputs), Tag::Tokens, view);
            }
            Ok(())
        })
    }
}

/// Sends the experts' results back to the tokens' home ranks and sums them, in fp32 and always in the same order.
/// Collective: every rank of the group calls it, in the same order of operations. Enqueued on `stream`; the host does
/// not wait, except as in `ncclEpDispatch`. A token to which no expert contributes gets zeros.
///
/// LL: inputs TOKENS [L, R*M, H], rows where dispatch put their tokens; local_tensors TOPK_WEIGHTS float32 [T, K];
/// outputs TOKENS [T, H]: for each token the weighted sum over its experts. A rank that hosts several experts of a
/// token sums their rows by ascending k, as dispatched, rounds the sum and sends that; on one node the home rank sums
/// by ascending rank. With NCCL_EP_LL_COMBINE=exact, on one node only, the home rank sums all rows, by ascending k of
/// the combine, without rounding in between.
///
/// LL after a rank-major dispatch of the handle: inputs TOKENS [R, M, H], where each token's row is what this rank's
/// experts contribute, weighted and summed by the caller; no weights; outputs TOKENS [T, H]: for each token the sum of
/// the rows of its ranks, ordered by the lowest k whose expert is on the rank, whatever NCCL_EP_LL_COMBINE says. The
/// ids are those at the dispatch, not the current ones.
///
/// LL otherwise reads the ids again and finds the rows by them, so a token's (id, weight) pairs may be permuted in
/// place between a dispatch and its combine. If a token repeats an expert, its m-th entry means the m-th that was
/// dispatched; surplus entries add their weights to the last one dispatched. An id that was masked (made negative)
/// since the dispatch, or that was not dispatched, is ignored.
///
/// HT forward: inputs TOKENS [n, H], in dispatch's order, where the caller has applied the weights and summed the local
/// experts of each token; outputs TOKENS [T, H]: the sum over ranks, on one node by ascending rank.
/// HT backward: also inputs TOPK_WEIGHTS float32 [n, K], packed as dispatch delivers weights; outputs TOPK_WEIGHTS
/// [T, K]: by ascending global expert id, then zeros. An expert that a token repeats has one column: the gradient of
/// the sum of its weights, which is that of each of them.
///
/// Over several nodes both modes sum node by node: another node's sum is rounded once, because it travels as a row. So
/// the last bits of a token depend on its home node, unless NCCL_EP_NODE_SUMS=invariant. docs/several-nodes.md has the
/// order of nodes.
///
/// @param handle             the routing; LL: after a dispatch on it, which, if captured, must have been replayed
/// @param inputs             tensors that are read
/// @param num_inputs         their number
/// @param outputs            tensors that are written
/// @param num_outputs        their number
/// @param local_tensors      tensors of this rank alone
/// @param num_local_tensors  their number
/// @param send_only          LL: if not 0, only send now; `ncclEpComplete` receives. The same on every rank. HT: no
///                           effect
/// @param config             may be NULL
/// @param stream             stream to run on; NULL is the default stream
///
/// Returns as `ncclEpDispatch`, and `ncclInvalidUsage` for an LL handle without a dispatch.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The ABI's.
pub unsafe extern "C" fn ncclEpCombine(
    handle: ncclEpHandle_t,
    inputs: *const *const ncclNDTensor_t,
    num_inputs: c_uint,
    outputs: *const *mut ncclNDTensor_t,
    num_outputs: c_uint,
    local_tensors: *const *mut ncclNDTensor_t,
    num_local_tensors: c_uint,
    send_only: c_uint,
    config: *const ncclEpCombineConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let _ = config; // No options are defined.
    let lists = RawLists {
        inputs: (inputs, num_inputs),
        outputs: (outputs, num_outputs),
        locals: (local_tensors, num_local_tensors),
    };
    // SAFETY: this function's contract.
    unsafe {
        operate("ncclEpCombine", handle, lists, |handle, tensors| {
            let stream = Stream(stream as usize);
            handle.combine(&tensors.of_combine(), send_only != 0, stream)
        })
    }
}

/// Enqueues the receive phase of the handle's staged operation on `stream`. It runs after the send phase, even if that
/// was enqueued on another stream. A successful no-op if nothing is staged, and in HT.
///
/// Two staged operations of a group may be pending at once. Before a third is sent, all ranks complete the same one of
/// the two, or destroy its handle. A refused call changes nothing and may be repeated.
///
/// @param handle  the handle
/// @param config  may be NULL
/// @param stream  stream to run on; NULL is the default stream
///
/// Returns `ncclInvalidArgument` for a NULL or dead handle; `ncclInvalidUsage` for a handle whose group was destroyed,
/// or if `stream` is not captured into the same graph as the send phase; or the code of the failure if the group has
/// failed.
///
/// # Safety
/// `stream` is a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpComplete(
    handle: ncclEpHandle_t,
    config: *const ncclEpCompleteConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let _ = config; // No options are defined.
    on_handle("ncclEpComplete", handle, |handle| handle.complete(Stream(stream as usize)))
}

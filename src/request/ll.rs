//! LL dispatch and combine: rules of their tensors.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::model::dtype::DType;
use crate::model::group::{GroupFacts, ROW_ALIGN};
use crate::model::ops::{LlCombine, LlDispatch, Routing};
use crate::model::tensor::Tag;
use crate::request::OpTensors;
use crate::request::argument::{Argument, expert_counter, no_scales};

/// Checks a dispatch: TOKENS `[T, H]` to TOKENS `[L, R*M, H]`, optional counter `[L]`.
pub fn dispatch(facts: &GroupFacts, routing: &Routing, tensors: &OpTensors) -> Result<LlDispatch> {
    no_scales("inputs", &tensors.inputs)?;
    no_scales("outputs", &tensors.outputs)?;
    let tokens = Argument::required("inputs", &tensors.inputs, Tag::Tokens)?.dims(2)?;
    let row = tokens.token_row(1, facts)?;
    let tokens = tokens.size_is(0, routing.tokens, "the handle's number of tokens")?;
    let out = Argument::required("outputs", &tensors.outputs, Tag::Tokens)?;
    let out = expert_rows(out, facts)?.row_is(2, row)?;
    let counter = expert_counter(
        &tensors.locals,
        Tag::RecvExpertCounterDevice,
        facts,
        Argument::size_is,
    )?;
    Ok(LlDispatch {
        row,
        tokens: tokens.data(ROW_ALIGN)?,
        out: out.data(ROW_ALIGN)?,
        counter,
    })
}

/// Checks a combine: TOKENS `[L, R*M, H]` and local TOPK_WEIGHTS `[T, K]` to TOKENS `[T, H]`.
pub fn combine(facts: &GroupFacts, routing: &Routing, tensors: &OpTensors) -> Result<LlCombine> {
    no_scales("inputs", &tensors.inputs)?;
    let expert_tokens = Argument::required("inputs", &tensors.inputs, Tag::Tokens)?;
    let expert_tokens = expert_rows(expert_tokens, facts)?;
    let row = expert_tokens.token_row(2, facts)?;
    // The reference's header wants the weights among the local tensors, its README among the inputs.
    let weights = match Argument::optional("inputs", &tensors.inputs, Tag::TopkWeights) {
        Some(weights) if tensors.locals.get(Tag::TopkWeights).is_none() => weights,
        _ => Argument::required("local_tensors", &tensors.locals, Tag::TopkWeights)?,
    };
    let weights = weights
        .dims(2)?
        .dtype_is(DType::Float32)?
        .size_is(0, routing.tokens, "the handle's number of tokens")?
        .size_is(1, routing.top_k, "the handle's top-k")?;
    let out = Argument::required("outputs", &tensors.outputs, Tag::Tokens)?
        .dims(2)?
        .size_is(0, routing.tokens, "the handle's number of tokens")?
        .row_is(1, row)?;
    Ok(LlCombine {
        row,
        expert_rows: expert_tokens.data(ROW_ALIGN)?,
        weights: weights.data(4)?,
        out: out.data(ROW_ALIGN)?,
    })
}

/// An expert-major tensor `[L, R*M, *]`.
fn expert_rows<'a>(tensor: Argument<'a>, facts: &GroupFacts) -> Result<Argument<'a>> {
    tensor
        .dims(3)?
        .size_is(0, facts.local_experts(), "the number of local experts")?
        .size_is(
            1,
            facts.max_recv_rows().unwrap_or(0),
            "ranks times max_tokens_per_rank",
        )
}

//! Rules for the tensors of LL dispatch and combine.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::error::refusal::{Extent, Role};
use crate::model::group::{GroupFacts, ROW_ALIGN};
use crate::model::ops::{LlCombine, LlDispatch, Routing};
use crate::model::tensor::DType;
use crate::rule::argument::{Argument, expert_counter};
use crate::rule::rows::{self, DispatchRows, Received};
use crate::rule::{CombineTensors, DispatchTensors};

/// Checks a dispatch: tokens `[T, H]` to `[L, rows, H]`, optional counter `[L]`.
pub fn dispatch(
    facts: &GroupFacts,
    routing: &Routing,
    tensors: &DispatchTensors<'_>,
) -> Result<LlDispatch> {
    let tokens = Argument::required(Role::TokensIn, tensors.tokens)?.dims(2)?;
    let out = Argument::required(Role::TokensOut, tensors.out_tokens)?;
    let received = Received {
        out: Some(expert_rows(out, facts)?),
        experts: Some((facts.local_experts(), facts.max_recv_rows.unwrap_or(0))),
    };
    let DispatchRows {
        row,
        scaled,
        tokens,
        out,
    } = rows::dispatch(facts, routing, (tokens, received), tensors)?;
    let counter = expert_counter(Role::Counter, tensors.counter, facts, Argument::size_is)?;
    Ok(LlDispatch {
        row,
        scaled,
        tokens,
        out: out.unwrap_or_default(),
        counter,
    })
}

/// Checks a combine: tokens `[L, rows, H]` and weights `[T, K]` to tokens `[T, H]`.
pub fn combine(
    facts: &GroupFacts,
    routing: &Routing,
    tensors: &CombineTensors<'_>,
) -> Result<LlCombine> {
    rows::no_scales(tensors)?;
    let expert_tokens = Argument::required(Role::TokensIn, tensors.tokens)?;
    let expert_tokens = expert_rows(expert_tokens, facts)?;
    let row = expert_tokens.summable_row(2, facts)?;
    let weights = match (tensors.token_weights, tensors.weights) {
        (None, Some(weights)) => Argument::new(Role::WeightsIn, weights),
        (apart, _) => Argument::required(Role::TokenWeights, apart)?,
    };
    let weights = weights
        .dims(2)?
        .dtype_is(DType::Float32)?
        .size_is(0, routing.tokens, Extent::HandleTokens)?
        .size_is(1, routing.top_k, Extent::HandleTopK)?;
    let out = Argument::required(Role::TokensOut, tensors.out_tokens)?
        .dims(2)?
        .size_is(0, routing.tokens, Extent::HandleTokens)?
        .row_is(1, row)?;
    Ok(LlCombine {
        row,
        expert_rows: expert_tokens.data(ROW_ALIGN)?,
        weights: weights.data(4)?,
        out: out.data(ROW_ALIGN)?,
    })
}

/// An expert-major tensor `[L, rows, *]`.
fn expert_rows<'a>(tensor: Argument<'a>, facts: &GroupFacts) -> Result<Argument<'a>> {
    let rows = facts.max_recv_rows.unwrap_or(0);
    tensor
        .dims(3)?
        .size_is(0, facts.local_experts(), Extent::LocalExperts)?
        .size_is(1, rows, Extent::RecvRows)
}

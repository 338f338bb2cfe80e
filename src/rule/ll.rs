//! Rules for the tensors of LL dispatch and combine.

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
        out: Some(rows::received(out, facts.layout())?),
        layout: facts.layout(),
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
    let layout = facts.layout();
    let expert_tokens = rows::received(expert_tokens, layout)?;
    let row = expert_tokens.summable_row(layout.dims(), facts)?;
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

//! Rules for the tensors of LL dispatch and combine.

use crate::error::Result;
use crate::error::refusal::{Extent, OfTensor, Role};
use crate::model::group::{GroupFacts, ROW_ALIGN};
use crate::model::layout::Layout;
use crate::model::ops::{Launch, LlCombine, LlDispatch, Numbers, RankMajorTopk, Routing};
use crate::model::tensor::{DType, Tensor};
use crate::rule::argument::{Argument, counter, expert_counter};
use crate::rule::rows::{self, DispatchRows, Received};
use crate::rule::{CombineTensors, DispatchTensors, handle};

/// Checks a dispatch: tokens `[T, H]` to `[L, rows, H]`, optional counter `[L]`. A dispatch that delivers ids is
/// rank-major: to `[R, M, H]`, with weights `[T, K]`, optional counter `[R]`. NULL as output asks for a view.
pub fn dispatch(facts: &GroupFacts, routing: &Routing, tensors: &DispatchTensors<'_>) -> Result<LlDispatch> {
    let tokens = Argument::required(Role::TokensIn, tensors.tokens)?.dims(2)?;
    let out = Argument::required(Role::TokensOut, tensors.out_tokens)?;
    let layout = match tensors.out_ids {
        None => facts.layout(),
        Some(_) => facts.rank_major(),
    };
    let received = Received { out: Some(rows::received(out, layout)?), layout };
    let DispatchRows { row, scaled, tokens, out } = rows::dispatch(facts, routing, (tokens, received), tensors)?;
    let (topk, counter) = match tensors.out_ids {
        None => (None, expert_counter(Role::Counter, tensors.counter, facts, Argument::size_is)?),
        Some(ids) => (
            Some(rank_topk(layout, routing, (ids, tensors), tensors.first_id(facts))?),
            counter(Role::Counter, tensors.counter, |counter| counter.size_is(0, facts.ranks, Extent::Ranks))?,
        ),
    };
    Ok(LlDispatch {
        row,
        scaled,
        tokens,
        out: out.unwrap_or_default(),
        view: None,
        layout,
        topk,
        counter,
        waits: None,
        totals: None,
        launch: Launch::default(),
    })
}

/// Checks the ids and weights of a rank-major dispatch.
// Not inlined, like rows with scales, as most dispatches do not need it.
#[inline(never)]
fn rank_topk(
    layout: Layout,
    routing: &Routing,
    (ids, tensors): (&Tensor, &DispatchTensors<'_>),
    first_id: usize,
) -> Result<RankMajorTopk> {
    let of_entries = |tensor: Argument<'_>| tensor.size_is(layout.dims(), routing.top_k, Extent::HandleTopK).map(drop);
    let ids = rows::received(Argument::new(Role::IdsOut, ids), layout)?;
    let width = handle::width_of(&ids, routing.form)?;
    of_entries(ids)?;
    let weights = of_tokens(Argument::required(Role::WeightsIn, tensors.weights)?, routing)?;
    let Some(out_weights) = tensors.out_weights else { return Err(Argument::missing(Role::WeightsOut)) };
    let out_weights = rows::received(Argument::new(Role::WeightsOut, out_weights), layout)?.dtype_is(DType::Float32)?;
    of_entries(out_weights)?;
    Ok(RankMajorTopk {
        weights: weights.data(4)?,
        out_ids: Numbers { data: ids.data(width.bytes())?, width },
        first_id,
        out_weights: out_weights.data(4)?,
    })
}

/// Checks weights `[T, K]`.
fn of_tokens<'a>(weights: Argument<'a>, routing: &Routing) -> Result<Argument<'a>> {
    weights.dims(2)?.dtype_is(DType::Float32)?.size_is(0, routing.tokens, Extent::HandleTokens)?.size_is(
        1,
        routing.top_k,
        Extent::HandleTopK,
    )
}

/// Checks a combine of rows in the layout of the last dispatch: tokens `[L, rows, H]` and weights `[T, K]`, or only
/// tokens `[R, M, H]`, to tokens `[T, H]`.
pub fn combine(
    facts: &GroupFacts,
    routing: &Routing,
    tensors: &CombineTensors<'_>,
    layout: Layout,
) -> Result<LlCombine> {
    rows::no_scales(tensors)?;
    let expert_tokens = rows::received(Argument::required(Role::TokensIn, tensors.tokens)?, layout)?;
    let row = expert_tokens.summable_row(layout.dims(), facts)?;
    let weights = if layout.is_rank_major() { no_weights(tensors)? } else { Some(weights(routing, tensors)?) };
    let out = Argument::required(Role::TokensOut, tensors.out_tokens)?
        .dims(2)?
        .size_is(0, routing.tokens, Extent::HandleTokens)?
        .row_is(1, row)?;
    Ok(LlCombine {
        row,
        expert_rows: expert_tokens.data(ROW_ALIGN)?,
        view: None,
        layout,
        weights: weights.map(|weights| weights.data(4)).transpose()?,
        out: out.data(ROW_ALIGN)?,
        sums: facts.ll_combine,
        waits: None,
        launch: Launch::default(),
    })
}

fn weights<'a>(routing: &Routing, tensors: &CombineTensors<'a>) -> Result<Argument<'a>> {
    let weights = match (tensors.token_weights, tensors.weights) {
        (None, Some(weights)) => Argument::new(Role::WeightsIn, weights),
        (apart, _) => Argument::required(Role::TokenWeights, apart)?,
    };
    of_tokens(weights, routing)
}

fn no_weights<'a>(tensors: &CombineTensors<'_>) -> Result<Option<Argument<'a>>> {
    let rule = OfTensor::WeighedByCaller;
    Argument::absent(Role::TokenWeights, tensors.token_weights, rule)?;
    Argument::absent(Role::WeightsIn, tensors.weights, rule)?;
    Ok(None)
}

//! Rules for the tensors of HT dispatch and combine.

use crate::error::refusal::{Extent, OfTensor, Role, Subject};
use crate::error::{Error, Result};
use crate::model::group::{GroupFacts, MAX_TOP_K, ROW_ALIGN};
use crate::model::ops::{
    HandleForm, HtCombine, HtDispatch, HtPath, IdsAndWeights, Launch, Routing, Rows, WeightGradients,
};
use crate::model::tensor::{DType, DevPtr};
use crate::rule::argument::{Argument, expert_counter};
use crate::rule::rows::{self, DispatchRows, Received};
use crate::rule::{CombineTensors, DispatchTensors};

/// Checks a dispatch. It is a forward dispatch if it has ids as inputs, or weights if the handle keeps its ids;
/// otherwise it sends only tokens.
pub fn dispatch(facts: &GroupFacts, routing: &Routing, tensors: &DispatchTensors<'_>) -> Result<HtDispatch> {
    let tokens = Argument::required(Role::TokensIn, tensors.tokens)?.dims(2)?;
    let out = Argument::optional(Role::TokensOut, tensors.out_tokens);
    let layout = facts.layout();
    let out = out.map(|out| rows::received(out, layout)).transpose()?;
    let received = Received { out, layout };
    let out_rows = out.map(|out| out.size(0));
    let DispatchRows { row, scaled, tokens, out } = rows::dispatch(facts, routing, (tokens, received), tensors)?;
    if routing.form.zones.is_some() && scaled.is_some_and(|scaled| scaled.cast().is_some()) {
        return Err(Error::argument(Subject::Tensor(Role::ScalesIn), OfTensor::NotCastByExpert));
    }
    let out = out.zip(out_rows).map(|(data, rows)| Rows { data, rows });
    let routing_in = forward_inputs(routing, tensors)?;
    let routing_out = match routing_in {
        Some(_) => forward_outputs(routing, tensors)?,
        None => {
            let rule = OfTensor::OnlyWithRouting;
            Argument::absent(Role::IdsOut, tensors.out_ids, rule)?;
            Argument::absent(Role::WeightsOut, tensors.out_weights, rule)?;
            None
        }
    };
    let counter = expert_counter(Role::Counter, tensors.counter, facts, Argument::size_at_least)?;
    Ok(HtDispatch {
        row,
        scaled,
        tokens,
        out,
        routing_in,
        routing_out,
        counter,
        first_id: tensors.first_id(facts),
        keeps_rest: tensors.keeps_rest,
        launch: Launch::default(),
        path: HtPath::default(),
        counters: tensors.counters,
    })
}

/// Checks ids and weights `[T, K]`: both (forward) or neither (only tokens).
fn forward_inputs(routing: &Routing, tensors: &DispatchTensors<'_>) -> Result<Option<IdsAndWeights>> {
    if routing.form.keeps_ids {
        return kept_ids(routing, tensors);
    }
    let Some(ids) = Argument::optional(Role::IdsIn, tensors.ids) else {
        Argument::absent(Role::WeightsIn, tensors.weights, OfTensor::OnlyWithIds)?;
        return Ok(None);
    };
    let weights = Argument::required(Role::WeightsIn, tensors.weights)?;
    let (ids, weights) = ids_and_weights(ids, weights, routing.top_k)?;
    let ids = ids.size_is(0, routing.tokens, Extent::HandleTokens)?;
    let weights = weights.size_is(0, routing.tokens, Extent::HandleTokens)?;
    Ok(Some(IdsAndWeights { ids: ids.data(8)?, weights: weights.data(4)?, rows: routing.tokens }))
}

/// Checks weights `[T, K]` for ids that the handle keeps.
fn kept_ids(routing: &Routing, tensors: &DispatchTensors<'_>) -> Result<Option<IdsAndWeights>> {
    let Some(weights) = Argument::optional(Role::WeightsIn, tensors.weights) else { return Ok(None) };
    let weights = weights_of(weights, routing.top_k)?.size_is(0, routing.tokens, Extent::HandleTokens)?;
    Ok(Some(IdsAndWeights { ids: routing.ids, weights: weights.data(4)?, rows: routing.tokens }))
}

/// Checks ids and weights `[n, K]`: both or neither.
fn forward_outputs(routing: &Routing, tensors: &DispatchTensors<'_>) -> Result<Option<IdsAndWeights>> {
    if tensors.out_ids.is_none() && tensors.out_weights.is_none() {
        return Ok(None);
    }
    if routing.form.zones.is_some() {
        let weights = Argument::required(Role::WeightsOut, tensors.out_weights)?;
        let weights = weights.dims(1)?.dtype_is(DType::Float32)?;
        return Ok(Some(IdsAndWeights { ids: DevPtr::default(), weights: weights.data(4)?, rows: weights.size(0) }));
    }
    let ids = Argument::required(Role::IdsOut, tensors.out_ids)?;
    let weights = Argument::required(Role::WeightsOut, tensors.out_weights)?;
    let (ids, weights) = ids_and_weights(ids, weights, routing.top_k)?;
    let weights = weights.size_is(0, ids.size(0), Extent::RowsOf(Role::IdsOut))?;
    Ok(Some(IdsAndWeights { ids: ids.data(8)?, weights: weights.data(4)?, rows: ids.size(0) }))
}

fn ids_and_weights<'a>(ids: Argument<'a>, weights: Argument<'a>, top_k: usize) -> Result<(Argument<'a>, Argument<'a>)> {
    let ids = ids.dims(2)?.dtype_is(DType::Int64)?.size_is(1, top_k, Extent::HandleTopK)?;
    Ok((ids, weights_of(weights, top_k)?))
}

fn weights_of(weights: Argument<'_>, top_k: usize) -> Result<Argument<'_>> {
    weights.dims(2)?.dtype_is(DType::Float32)?.size_is(1, top_k, Extent::HandleTopK)
}

/// Checks a combine: tokens `[n, H]` to `[T, H]`; backward, also weights `[n, K]` to `[T, K]`.
pub fn combine(facts: &GroupFacts, routing: &Routing, tensors: &CombineTensors<'_>) -> Result<HtCombine> {
    rows::no_scales(tensors)?;
    let tokens = rows::received(Argument::required(Role::TokensIn, tensors.tokens)?, facts.layout())?;
    let row = tokens.summable_row(facts.layout().dims(), facts)?;
    let out = Argument::required(Role::TokensOut, tensors.out_tokens)?
        .dims(2)?
        .size_is(0, routing.tokens, Extent::HandleTokens)?
        .row_is(1, row)?;
    Ok(HtCombine {
        row,
        expert_rows: Rows { data: tokens.data(ROW_ALIGN)?, rows: tokens.size(0) },
        out: out.data(ROW_ALIGN)?,
        gradients: gradients(routing, tensors, tokens)?,
        waits: None,
        launch: Launch::default(),
        path: HtPath::default(),
    })
}

/// Refuses outputs of a dispatch that cannot hold the rows that come here, if the caller was told how many, or has set
/// a bound. Otherwise only the kernels notice, and the group fails.
pub fn dispatch_holds(routing: &Routing, op: &HtDispatch, least: usize) -> Result<()> {
    holds(Role::TokensOut, op.out.map_or(usize::MAX, |out| out.rows), least)?;
    let role = if routing.form.zones.is_some() { Role::WeightsOut } else { Role::IdsOut };
    holds(role, op.routing_out.map_or(usize::MAX, |out| out.rows), least)
}

/// Refuses a combine of fewer rows, or gradients, than came here, likewise.
pub fn combine_holds(op: &HtCombine, least: usize) -> Result<()> {
    holds(Role::TokensIn, op.expert_rows.rows, least)?;
    holds(Role::WeightsIn, op.gradients.map_or(usize::MAX, |gradients| gradients.rows), least)
}

fn holds(role: Role, rows: usize, least: usize) -> Result<()> {
    if rows >= least {
        return Ok(());
    }
    let refused = Error::usage(Subject::Size(role, 0), OfTensor::HoldsAllReceived);
    Err(refused.got(rows, format_args!("{least} or more")))
}

fn gradients(routing: &Routing, tensors: &CombineTensors<'_>, of: Argument<'_>) -> Result<Option<WeightGradients>> {
    let Some(input) = Argument::optional(Role::WeightsIn, tensors.weights) else {
        return Ok(None); // An output without an input is ignored, as the reference does.
    };
    let HandleForm { keeps_ids, zones, .. } = routing.form;
    let input = input.dims(if zones.is_some() { 1 } else { 2 })?.dtype_is(DType::Float32)?;
    let input = match tensors.keeps_rest {
        true => input,
        false => input.size_is(0, of.size(0), Extent::RowsOf(Role::TokensIn))?,
    };
    let input = match (keeps_ids, zones) {
        (_, Some(_)) => input,
        (true, None) => input.size_is(1, routing.top_k, Extent::HandleTopK)?,
        (false, None) => input.size_at_most(1, MAX_TOP_K, Extent::MostTopK)?,
    };
    let top_k = match zones {
        Some(_) => routing.top_k,
        None => input.size(1),
    };
    let output = Argument::required(Role::WeightsOut, tensors.out_weights)?
        .dims(2)?
        .dtype_is(DType::Float32)?
        .size_is(0, routing.tokens, Extent::HandleTokens)?
        .size_is(1, top_k, Extent::ColumnsOf(Role::WeightsIn))?;
    let (input, rows) = (input.data(4)?, input.size(0));
    Ok(Some(WeightGradients { input, rows, output: output.data(4)?, top_k, by_k: keeps_ids }))
}

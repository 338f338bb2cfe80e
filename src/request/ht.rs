//! HT dispatch and combine: rules of their tensors.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::model::dtype::DType;
use crate::model::group::{GroupFacts, MAX_TOP_K, ROW_ALIGN};
use crate::model::ops::{HtCombine, HtDispatch, IdsAndWeights, Routing, Rows, WeightGradients};
use crate::model::tensor::{Tag, TensorSet};
use crate::request::OpTensors;
use crate::request::argument::{Argument, expert_counter, no_scales};

const HOME_ROWS: &str = "the handle's number of tokens";

/// Checks a dispatch. With ids among the inputs it is a forward dispatch; else tokens only.
pub fn dispatch(facts: &GroupFacts, routing: &Routing, tensors: &OpTensors) -> Result<HtDispatch> {
    no_scales("inputs", &tensors.inputs)?;
    no_scales("outputs", &tensors.outputs)?;
    let tokens = Argument::required("inputs", &tensors.inputs, Tag::Tokens)?.dims(2)?;
    let row = tokens.token_row(1, facts)?;
    let tokens = tokens.size_is(0, routing.tokens, HOME_ROWS)?;
    let out = match Argument::optional("outputs", &tensors.outputs, Tag::Tokens) {
        Some(out) => {
            let out = out.dims(2)?.row_is(1, row)?;
            Some(Rows {
                data: out.data(ROW_ALIGN)?,
                rows: out.size(0),
            })
        }
        None => None,
    };
    let routing_in = forward_inputs(routing, &tensors.inputs)?;
    let routing_out = match routing_in {
        Some(_) => forward_outputs(routing, &tensors.outputs)?,
        None => {
            for tag in [Tag::TopkIdx, Tag::TopkWeights] {
                let why = "needs inputs[TOPK_IDX] and inputs[TOPK_WEIGHTS]: a tokens-only dispatch has none";
                Argument::absent("outputs", &tensors.outputs, tag, why)?;
            }
            None
        }
    };
    let counter = expert_counter(
        &tensors.locals,
        Tag::RecvExpertCounterDevice,
        facts,
        Argument::size_at_least,
    )?;
    Ok(HtDispatch {
        row,
        tokens: tokens.data(ROW_ALIGN)?,
        out,
        routing_in,
        routing_out,
        counter,
    })
}

/// Ids and weights `[T, K]`: both (forward) or neither (tokens only).
fn forward_inputs(routing: &Routing, inputs: &TensorSet) -> Result<Option<IdsAndWeights>> {
    let Some(ids) = Argument::optional("inputs", inputs, Tag::TopkIdx) else {
        let why = "needs inputs[TOPK_IDX]: a tokens-only dispatch has no weights";
        Argument::absent("inputs", inputs, Tag::TopkWeights, why)?;
        return Ok(None);
    };
    let weights = Argument::required("inputs", inputs, Tag::TopkWeights)?;
    let (ids, weights) = ids_and_weights(ids, weights, routing.top_k)?;
    let ids = ids.size_is(0, routing.tokens, HOME_ROWS)?;
    let weights = weights.size_is(0, routing.tokens, HOME_ROWS)?;
    Ok(Some(IdsAndWeights {
        ids: ids.data(8)?,
        weights: weights.data(4)?,
        rows: routing.tokens,
    }))
}

/// Ids and weights `[n, K]`: both or neither.
fn forward_outputs(routing: &Routing, outputs: &TensorSet) -> Result<Option<IdsAndWeights>> {
    let has = |tag| outputs.get(tag).is_some();
    if !has(Tag::TopkIdx) && !has(Tag::TopkWeights) {
        return Ok(None);
    }
    let ids = Argument::required("outputs", outputs, Tag::TopkIdx)?;
    let weights = Argument::required("outputs", outputs, Tag::TopkWeights)?;
    let (ids, weights) = ids_and_weights(ids, weights, routing.top_k)?;
    let weights = weights.size_is(0, ids.size(0), "the rows of outputs[TOPK_IDX]")?;
    Ok(Some(IdsAndWeights {
        ids: ids.data(8)?,
        weights: weights.data(4)?,
        rows: ids.size(0),
    }))
}

fn ids_and_weights<'a>(
    ids: Argument<'a>,
    weights: Argument<'a>,
    top_k: usize,
) -> Result<(Argument<'a>, Argument<'a>)> {
    const WHAT: &str = "the handle's top-k";
    let ids = ids
        .dims(2)?
        .dtype_is(DType::Int64)?
        .size_is(1, top_k, WHAT)?;
    let weights = weights
        .dims(2)?
        .dtype_is(DType::Float32)?
        .size_is(1, top_k, WHAT)?;
    Ok((ids, weights))
}

/// Checks a combine: TOKENS `[n, H]` to `[T, H]`; backward also TOPK_WEIGHTS `[n, K]` to `[T, K]`.
pub fn combine(facts: &GroupFacts, routing: &Routing, tensors: &OpTensors) -> Result<HtCombine> {
    no_scales("inputs", &tensors.inputs)?;
    let tokens = Argument::required("inputs", &tensors.inputs, Tag::Tokens)?.dims(2)?;
    let row = tokens.token_row(1, facts)?;
    let out = Argument::required("outputs", &tensors.outputs, Tag::Tokens)?
        .dims(2)?
        .size_is(0, routing.tokens, HOME_ROWS)?
        .row_is(1, row)?;
    let rows = tokens.size(0);
    Ok(HtCombine {
        row,
        expert_rows: Rows {
            data: tokens.data(ROW_ALIGN)?,
            rows,
        },
        out: out.data(ROW_ALIGN)?,
        gradients: gradients(routing, tensors, rows)?,
    })
}

fn gradients(
    routing: &Routing,
    tensors: &OpTensors,
    rows: usize,
) -> Result<Option<WeightGradients>> {
    let Some(input) = Argument::optional("inputs", &tensors.inputs, Tag::TopkWeights) else {
        return Ok(None); // An output without an input is ignored, as the reference does.
    };
    let input = input
        .dims(2)?
        .dtype_is(DType::Float32)?
        .size_is(0, rows, "the rows of inputs[TOKENS]")?
        .size_at_most(1, MAX_TOP_K, "the largest top-k")?;
    let top_k = input.size(1);
    let output = Argument::required("outputs", &tensors.outputs, Tag::TopkWeights)?
        .dims(2)?
        .dtype_is(DType::Float32)?
        .size_is(0, routing.tokens, HOME_ROWS)?
        .size_is(1, top_k, "the columns of inputs[TOPK_WEIGHTS]")?;
    Ok(Some(WeightGradients {
        input: input.data(4)?,
        output: output.data(4)?,
        top_k,
    }))
}

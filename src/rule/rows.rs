//! Rules for the rows of a dispatch and their scales, shared by LL and HT.

use crate::error::refusal::{Extent, OfTensor, Role, Subject};
use crate::error::{Error, Result};
use crate::model::group::{GroupFacts, ROW_ALIGN};
use crate::model::layout::Layout;
use crate::model::ops::Routing;
use crate::model::scales::{Cast, ScaleLayout, ScaleSource, ScaleTensor, ScaleType, Scaled, WireRow, cast_counts};
use crate::model::tensor::{DType, DevPtr, RowType, Strides};
use crate::rule::argument::Argument;
use crate::rule::{CombineTensors, DispatchTensors};

/// The tensor of received rows; its last dimension is not checked yet.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// The tensor; HT may have none.
    pub out: Option<Argument<'a>>,
    pub layout: Layout,
}

/// Checks a tensor of received rows, except for its last dimension.
pub fn received(tensor: Argument<'_>, layout: Layout) -> Result<Argument<'_>> {
    let tensor = tensor.dims(layout.dims() + 1)?;
    match layout {
        Layout::ExpertMajor { experts, slots } => {
            tensor.size_is(0, experts, Extent::LocalExperts)?.size_is(1, slots, Extent::RecvRows)
        }
        Layout::RankMajor { ranks, slots } => {
            tensor.size_is(0, ranks, Extent::Ranks)?.size_is(1, slots, Extent::MaxTokens)
        }
        Layout::Flat => Ok(tensor),
    }
}

/// The checked rows of a dispatch.
#[derive(Clone, Copy, Debug)]
pub struct DispatchRows {
    /// The type of rows as sent and received.
    pub row: RowType,
    pub scaled: Option<Scaled>,
    /// Rows that are read.
    pub tokens: DevPtr,
    /// Rows that are written.
    pub out: Option<DevPtr>,
}

/// Checks the rows and scales of a dispatch of `[T, H]` tokens.
// Inlined, without the code for scales, as the checks are a large part of an operation's host time.
#[inline]
pub fn dispatch(
    facts: &GroupFacts,
    routing: &Routing,
    (tokens, received): (Argument<'_>, Received<'_>),
    tensors: &DispatchTensors<'_>,
) -> Result<DispatchRows> {
    let from = tokens.known_dtype()?;
    let to = received.out.map(|out| out.known_dtype()).transpose()?;
    let (row, scaled) = if tensors.scales.is_some() || tensors.out_scales.is_some() {
        with_scales(facts, routing, (tokens, from), (received, to), tensors)?
    } else if let Some(to) = to.filter(|to| *to != from) {
        return Err(other_type(from, to));
    } else {
        (tokens.row(1, from, facts)?, None)
    };
    let tokens = tokens.size_is(0, routing.tokens, Extent::HandleTokens)?;
    let out = received.out.map(|out| {
        let out = out.size_is(received.layout.dims(), row.hidden, Extent::InputHidden)?;
        // In rank-major dispatches NULL asks for a view.
        if received.layout.is_rank_major() { out.data_or_none(ROW_ALIGN) } else { out.data(ROW_ALIGN) }
    });
    Ok(DispatchRows { row, scaled, out: out.transpose()?, tokens: tokens.data(ROW_ALIGN)? })
}

#[inline(never)]
fn with_scales(
    facts: &GroupFacts,
    routing: &Routing,
    (tokens, from): (Argument<'_>, DType),
    (received, to): (Received<'_>, Option<DType>),
    tensors: &DispatchTensors<'_>,
) -> Result<(RowType, Option<Scaled>)> {
    let is_cast = is_cast(from, to, tensors)?;
    let row = tokens.row(1, if is_cast { DType::Float8E4M3 } else { from }, facts)?;
    let scaled = match is_cast {
        true => Some(cast((from, row.hidden), &received, tensors)?),
        false => forward(routing, &received, tensors)?,
    };
    let wire = WireRow { payload: row, scales: scaled.map(|scaled| scaled.scales) };
    tokens.row_fits(1, wire.slot_bytes(), OfTensor::RowAndScalesBound, facts)?;
    Ok((row, scaled))
}

/// Whether a dispatch with scales is a cast, which rounds rows of `from` to e4m3 and makes the scales; otherwise it
/// moves both unchanged. `to` is the type of output rows, if there are any.
fn is_cast(from: DType, to: Option<DType>, tensors: &DispatchTensors<'_>) -> Result<bool> {
    let tensor = |role, rule| Error::argument(Subject::Tensor(role), rule);
    match (tensors.scales, to) {
        (Some(_), _) if tensors.out_scales.is_none() => Err(tensor(Role::ScalesOut, OfTensor::ScalesReceived)),
        (Some(_), Some(to)) if to != from => Err(other_type(from, to)),
        (Some(_), _) => Ok(false),
        (None, _) if !from.is_summable() => {
            Err(tensor(Role::ScalesIn, OfTensor::ScalesSent).got(from, "bfloat16, float16 or float32"))
        }
        (None, None) => Err(Argument::missing(Role::TokensOut)),
        (None, Some(DType::Float8E4M3 | DType::Uint8 | DType::Int8)) => Ok(true),
        (None, Some(to)) if to.size() == 1 => {
            let subject = Subject::ElementType(Role::TokensOut);
            Err(Error::argument(subject, OfTensor::CastToE4m3).got(to, DType::Float8E4M3))
        }
        (None, Some(to)) => Err(other_type(from, to)),
    }
}

#[cold]
fn other_type(from: DType, to: DType) -> Error {
    Error::argument(Subject::ElementType(Role::TokensOut), OfTensor::SameTypeOrCast).got(to, from)
}

/// Scales `[T, S]` to send unchanged; `None` if S is 0.
fn forward(routing: &Routing, received: &Received<'_>, tensors: &DispatchTensors<'_>) -> Result<Option<Scaled>> {
    let source = Argument::required(Role::ScalesIn, tensors.scales)?.dims(2)?;
    let dtype = source.known_dtype()?;
    if dtype.size() > 4 {
        return Err(source.refuse_dtype(OfTensor::ScaleWidth, dtype, "a type of 1, 2 or 4 bytes"));
    }
    let source = source.size_is(0, routing.tokens, Extent::HandleTokens)?;
    let count = source.size(1);
    let out = out_scales(received, tensors)?;
    let out_dtype = out.known_dtype()?;
    if out_dtype != dtype {
        return Err(out.refuse_dtype(OfTensor::TypeOf(Role::ScalesIn), out_dtype, dtype));
    }
    let out = out.size_is(received.layout.dims(), count, Extent::ColumnsOf(Role::ScalesIn))?;
    if tensors.round_scales != 0 {
        return Err(Error::argument(Subject::RoundScales, OfTensor::ForwardedAsIs).got(tensors.round_scales, 0));
    }
    let width = dtype.size();
    let out = place(Role::ScalesOut, (out, tensors.out_scale_strides), received.layout, width)?;
    let source = place(Role::ScalesIn, (source, tensors.scale_strides), Layout::Flat, width)?;
    Ok((count > 0).then_some(Scaled { scales: ScaleType { dtype, count }, source: ScaleSource::Forward(source), out }))
}

/// The scales that a cast of rows `[.., hidden]` of `from` makes.
fn cast((from, hidden): (DType, usize), received: &Received<'_>, tensors: &DispatchTensors<'_>) -> Result<Scaled> {
    let out = out_scales(received, tensors)?;
    let stored = out.known_dtype()?;
    let Some((large, small)) = cast_counts(stored, hidden) else {
        return Err(out.refuse_dtype(OfTensor::CastScaleType, stored, "float32, uint8, int32 or uint32"));
    };
    let last = received.layout.dims();
    let scales = ScaleType {
        // Ranks must agree on the scales' bits, so signed and unsigned types count as the same.
        dtype: match stored {
            DType::Uint32 => DType::Int32,
            other => other,
        },
        count: out.size(last),
    };
    let Some(cast) = Cast::new(from, hidden, scales, tensors.round_scales != 0) else {
        let rule = OfTensor::Exactly(Extent::Blocks);
        let error = Error::argument(Subject::Size(Role::ScalesOut, last), rule);
        return Err(match small {
            Some(small) if small != large => error.got(scales.count, format_args!("{large} or {small}")),
            _ => error.got(scales.count, large),
        });
    };
    Ok(Scaled {
        scales,
        source: ScaleSource::Cast(cast),
        out: place(Role::ScalesOut, (out, tensors.out_scale_strides), received.layout, stored.size())?,
    })
}

/// The tensor of received scales; its last dimension is not checked yet.
fn out_scales<'a>(received: &Received<'_>, tensors: &DispatchTensors<'a>) -> Result<Argument<'a>> {
    let out = Argument::required(Role::ScalesOut, tensors.out_scales)?.dims(received.layout.dims() + 1)?;
    match (received.layout, received.out) {
        (Layout::ExpertMajor { experts, slots }, _) => out
            .size_is(0, experts, Extent::ExpertsOf(Role::TokensOut))?
            .size_is(1, slots, Extent::RowsOf(Role::TokensOut)),
        (Layout::RankMajor { .. }, _) => self::received(out, received.layout),
        // If the rest is kept, rows and scales may differ in number.
        (Layout::Flat, Some(tokens)) if !tensors.keeps_rest => {
            out.size_is(0, tokens.size(0), Extent::RowsOf(Role::TokensOut))
        }
        (Layout::Flat, _) => Ok(out),
    }
}

/// The layout of a tensor of scales of `width` bytes for rows in `layout`.
fn place(
    role: Role,
    (tensor, strides): (Argument<'_>, Option<&Strides>),
    layout: Layout,
    width: usize,
) -> Result<ScaleTensor> {
    let given = strides.map(|strides| strides.of(tensor.num_dims()));
    let (zones, rows) = match layout {
        Layout::ExpertMajor { experts: zones, slots } | Layout::RankMajor { ranks: zones, slots } => (zones, slots),
        Layout::Flat => (1, tensor.size(0)),
    };
    let columns = tensor.size(layout.dims());
    let strides = given.map(|strides| match *strides {
        [row, column] => [0, row as usize, column as usize],
        [expert, row, column] => [expert as usize, row as usize, column as usize],
        _ => [0; 3],
    });
    let Some(layout) = ScaleLayout::new([zones, rows, columns], strides) else {
        return Err(Error::argument(Subject::Strides(role), OfTensor::Pitched).got(
            format_args!("{:?}", given.unwrap_or_default()),
            format_args!("pitches for {rows} rows of {columns} scales"),
        ));
    };
    Ok(ScaleTensor { data: tensor.data(width)?, rows, layout })
}

/// Refuses scales in a combine.
pub fn no_scales(tensors: &CombineTensors<'_>) -> Result<()> {
    let rule = OfTensor::SumsWithoutScales;
    Argument::absent(Role::ScalesIn, tensors.scales, rule)?;
    Argument::absent(Role::ScalesOut, tensors.out_scales, rule)
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;

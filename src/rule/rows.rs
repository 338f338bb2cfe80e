//! Rules for the rows of a dispatch and their scales, shared by LL and HT.

use crate::error::refusal::{Extent, OfTensor, Role, Subject};
use crate::error::{Error, Result};
use crate::model::group::{GroupFacts, ROW_ALIGN};
use crate::model::layout::Layout;
use crate::model::ops::Routing;
use crate::model::scales::{
    self, Cast, Given, Meaning, ScaleLayout, ScaleSource, ScaleTensor, ScaleType, Scaled, Unclear, WireRow,
};
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

impl Received<'_> {
    /// The address of `out`; rank-major, NULL asks for a view.
    #[inline]
    fn data_of(&self, out: Argument<'_>) -> Result<DevPtr> {
        if self.layout.is_rank_major() { out.data_or_none(ROW_ALIGN) } else { out.data(ROW_ALIGN) }
    }
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
    /// As sent and received.
    pub row: RowType,
    pub scaled: Option<Scaled>,
    /// Rows that are read.
    pub tokens: DevPtr,
    /// Rows that are written.
    pub out: Option<DevPtr>,
}

/// Checks the rows and scales of a dispatch of `[T, H]` tokens.
// Inlined, with the code for scales out of line: the checks are a large part of an operation's host time.
#[inline]
pub fn dispatch(
    facts: &GroupFacts,
    routing: &Routing,
    (tokens, received): (Argument<'_>, Received<'_>),
    tensors: &DispatchTensors<'_>,
) -> Result<DispatchRows> {
    if tensors.scales.is_some() || tensors.out_scales.is_some() {
        return with_scales(facts, routing, (tokens, received), tensors);
    }
    let from = tokens.known_dtype()?;
    let arriving = received.out.map(|out| out.known_dtype()).transpose()?;
    if arriving.is_some_and(|dtype| dtype != from) {
        return Err(refuse(Unclear::OtherType, from, arriving));
    }
    let row = tokens.row(1, from, facts)?;
    let (tokens, out) = sized(routing, row, (tokens, received))?;
    Ok(DispatchRows {
        row,
        scaled: None,
        out: out.map(|out| received.data_of(out)).transpose()?,
        tokens: tokens.data(ROW_ALIGN)?,
    })
}

#[inline(never)]
fn with_scales(
    facts: &GroupFacts,
    routing: &Routing,
    (tokens, received): (Argument<'_>, Received<'_>),
    tensors: &DispatchTensors<'_>,
) -> Result<DispatchRows> {
    let from = tokens.known_dtype()?;
    let meaning = meaning(from, &received, tensors)?;
    let dtype = match meaning {
        Meaning::Forward => from,
        Meaning::Cast => DType::Float8E4M3,
    };
    let row = tokens.row(1, dtype, facts)?;
    let scaled = match meaning {
        Meaning::Forward => forward(routing, &received, tensors)?,
        Meaning::Cast => Some(cast((from, row.hidden), &received, tensors)?),
    };
    let wire = WireRow { payload: row, scales: scaled.map(|scaled| scaled.scales) };
    tokens.row_fits(1, wire.slot_bytes(), OfTensor::RowAndScalesBound, facts)?;
    let (tokens, out) = sized(routing, row, (tokens, received))?;
    Ok(DispatchRows {
        row,
        scaled,
        out: out.map(|out| received.data_of(out)).transpose()?,
        tokens: tokens.data(ROW_ALIGN)?,
    })
}

/// Checks the extents of both tensors of rows.
#[inline]
fn sized<'a>(
    routing: &Routing,
    row: RowType,
    (tokens, received): (Argument<'a>, Received<'a>),
) -> Result<(Argument<'a>, Option<Argument<'a>>)> {
    let last = received.layout.dims();
    let tokens = tokens.size_is(0, routing.tokens, Extent::HandleTokens)?;
    let out = received.out;
    Ok((tokens, out.map(|out| out.size_is(last, row.hidden, Extent::InputHidden)).transpose()?))
}

/// What the tensors ask for.
fn meaning(from: DType, received: &Received<'_>, tensors: &DispatchTensors<'_>) -> Result<Meaning> {
    let out = received.out.map(|out| out.known_dtype()).transpose()?;
    let given = Given {
        tokens: from,
        scales: tensors.scales.is_some(),
        out_tokens: out,
        out_scales: tensors.out_scales.is_some(),
    };
    scales::meaning(&given).map_err(|unclear| refuse(unclear, from, out))
}

#[cold]
fn refuse(unclear: Unclear, from: DType, out: Option<DType>) -> Error {
    let tensor = |role, rule| Error::argument(Subject::Tensor(role), rule);
    let dtype = |rule| Error::argument(Subject::ElementType(Role::TokensOut), rule);
    let out = out.unwrap_or(from);
    match unclear {
        Unclear::ScalesNotReceived => tensor(Role::ScalesOut, OfTensor::ScalesReceived),
        Unclear::NotCastable => tensor(Role::ScalesIn, OfTensor::ScalesSent).got(from, "bfloat16, float16 or float32"),
        Unclear::CastWithoutRows => tensor(Role::TokensOut, OfTensor::Required),
        Unclear::OtherType => dtype(OfTensor::SameTypeOrCast).got(out, from),
        Unclear::OtherCast => dtype(OfTensor::CastToE4m3).got(out, DType::Float8E4M3),
    }
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
    let Some((large, small)) = scales::cast_counts(stored, hidden) else {
        return Err(out.refuse_dtype(OfTensor::CastScaleType, stored, "float32, uint8, int32 or uint32"));
    };
    let last = received.layout.dims();
    let scales = ScaleType {
        // Ranks must agree on the bits, whether their type is signed or not.
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
        (Layout::Flat, Some(tokens)) => out.size_is(0, tokens.size(0), Extent::RowsOf(Role::TokensOut)),
        (Layout::Flat, None) => Ok(out),
    }
}

/// The layout of scales of `width` bytes for rows in `layout`.
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

/// Refuses scales of a combine.
pub fn no_scales(tensors: &CombineTensors<'_>) -> Result<()> {
    let rule = OfTensor::SumsWithoutScales;
    Argument::absent(Role::ScalesIn, tensors.scales, rule)?;
    Argument::absent(Role::ScalesOut, tensors.out_scales, rule)
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;

//! The rows of a dispatch with their scales: sent, read from a message, and stored where the caller wants them.
#![allow(unsafe_code)]

use crate::backend::host::device::{bytes, read_element, write_element};
use crate::backend::host::e4m3::cast_row;
use crate::backend::host::message::{Message, Reader};
use crate::backend::host::numeric::{self, row};
use crate::error::{Error, Result};
use crate::model::layout::RowOf;
use crate::model::scales::{Cast, ScaleSource, ScaleTensor, ScaleType, Scaled, WireRow};
use crate::model::tensor::{DevPtr, RowType};

/// The rows that a rank sends.
#[derive(Clone, Copy)]
pub struct Outgoing<'a> {
    /// Rows in the caller's memory.
    pub data: DevPtr,
    pub tokens: usize,
    /// Their type when sent.
    pub row: RowType,
    pub scaled: Option<&'a Scaled>,
}

impl Outgoing<'_> {
    /// Appends payloads `[T, H]`, then scales `[T, S]`, both dense.
    ///
    /// # Safety
    /// `rule` has checked the tensors, and the caller keeps them until `message` is written.
    pub unsafe fn append(&self, message: &mut Message<'_>) -> Result<()> {
        // SAFETY: this function's contract.
        let rows = |bytes_of_row: usize| unsafe { bytes(self.data, self.tokens * bytes_of_row) };
        let Some(scaled) = self.scaled else {
            message.bytes(rows(self.row.bytes()));
            return Ok(());
        };
        match &scaled.source {
            ScaleSource::Forward(from) => {
                message.bytes(rows(self.row.bytes()));
                // SAFETY: this function's contract.
                message.bytes(unsafe { gathered(from, scaled.scales, self.tokens) });
            }
            ScaleSource::Cast(cast) => {
                let from = rows(self.row.hidden * cast.from.size());
                let (payload, scales) = self.cast(from, cast, scaled.scales)?;
                message.bytes(payload);
                message.bytes(scales);
            }
        }
        Ok(())
    }

    fn cast(&self, from: &[u8], cast: &Cast, scales: ScaleType) -> Result<(Vec<u8>, Vec<u8>)> {
        let mut payload = Vec::with_capacity(self.tokens * self.row.bytes());
        let mut made = Vec::with_capacity(self.tokens * scales.bytes());
        let mut elements = vec![0.0; self.row.hidden];
        for row in from.chunks_exact(self.row.hidden * cast.from.size()) {
            numeric::load(&mut elements, row, cast.from)?;
            cast_row(&elements, cast, scales.bytes(), (&mut payload, &mut made));
        }
        Ok((payload, made))
    }
}

/// The scales of `tokens` rows, dense.
///
/// # Safety
/// `rule` has checked the tensor, and nobody writes to it.
unsafe fn gathered(from: &ScaleTensor, scales: ScaleType, tokens: usize) -> Vec<u8> {
    let mut dense = vec![0; tokens * scales.bytes()];
    for (index, to) in dense.chunks_exact_mut(scales.dtype.size()).enumerate() {
        let (token, column) = (index / scales.count, index % scales.count);
        let element = from.layout.element(0, token, column);
        // SAFETY: this function's contract; the element is one of the tensor.
        unsafe { read_element(from.data, element, to) };
    }
    dense
}

/// The rows of a message.
#[derive(Clone, Copy)]
pub struct Incoming<'a> {
    wire: WireRow,
    payload: &'a [u8],
    scales: &'a [u8],
}

impl<'a> Incoming<'a> {
    /// Reads `tokens` rows, which [`Outgoing::append`] wrote.
    pub fn read(reader: &mut Reader<'a>, tokens: usize, wire: WireRow) -> Result<Self> {
        Ok(Self {
            wire,
            payload: reader.array(tokens, wire.payload.bytes())?,
            scales: reader.array(tokens, wire.scale_bytes())?,
        })
    }

    pub fn payload(&self, token: usize) -> Result<&'a [u8]> {
        row(self.payload, token, self.wire.payload.bytes())
    }

    pub fn scales(&self, token: usize) -> Result<&'a [u8]> {
        row(self.scales, token, self.wire.scale_bytes())
    }
}

/// Writes the scales of one row.
///
/// # Safety
/// `rule` has checked the tensor, of which `row` is one, and the caller leaves it to the operation.
pub unsafe fn store(scaled: &Scaled, row: RowOf, scales: &[u8]) -> Result<()> {
    let ScaleTensor { data, rows, layout } = scaled.out;
    if row.ordinal >= rows {
        return Err(Error::internal("scales outside their tensor"));
    }
    let width = scaled.scales.dtype.size();
    for (column, scale) in scales.chunks_exact(width).enumerate() {
        // SAFETY: this function's contract; the element is one of the tensor.
        unsafe { write_element(data, layout.element(row.zone, row.ordinal, column), scale) };
    }
    Ok(())
}

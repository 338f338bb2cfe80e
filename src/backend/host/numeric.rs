//! Arithmetic on rows: fp32 accumulation of bf16, f16 and f32 elements, one rounding at the end.

use crate::error::{Error, Result};
use crate::model::tensor::DType;
use half::{bf16, f16};
use std::ops::Range;

/// `sums[i] += row[i]`.
pub fn add(sums: &mut [f32], row: &[u8], dtype: DType) -> Result<()> {
    for_each(sums, row, dtype, |sum, element| *sum += element)
}

/// `sums[i] = fma(weight, row[i], sums[i])`.
pub fn add_scaled(sums: &mut [f32], weight: f32, row: &[u8], dtype: DType) -> Result<()> {
    for_each(sums, row, dtype, |sum, element| *sum = weight.mul_add(element, *sum))
}

/// `elements[i] = row[i]`.
pub fn load(elements: &mut [f32], row: &[u8], dtype: DType) -> Result<()> {
    for_each(elements, row, dtype, |to, element| *to = element)
}

/// `row[i] = round(sums[i])`, to nearest, ties to even.
pub fn store(row: &mut [u8], sums: &[f32], dtype: DType) -> Result<()> {
    fn write<const N: usize>(row: &mut [u8], sums: &[f32], bytes: impl Fn(f32) -> [u8; N]) {
        row.as_chunks_mut().0.iter_mut().zip(sums).for_each(|(to, sum)| *to = bytes(*sum));
    }
    match dtype {
        DType::Bfloat16 => write(row, sums, |sum| bf16::from_f32(sum).to_ne_bytes()),
        DType::Float16 => write(row, sums, |sum| f16::from_f32(sum).to_ne_bytes()),
        DType::Float32 => write(row, sums, f32::to_ne_bytes),
        _ => return Err(unsummable(dtype)),
    }
    Ok(())
}

fn for_each(sums: &mut [f32], row: &[u8], dtype: DType, update: impl Fn(&mut f32, f32)) -> Result<()> {
    fn read<const N: usize>(row: &[u8], number: impl Fn([u8; N]) -> f32) -> impl Iterator<Item = f32> {
        row.as_chunks().0.iter().map(move |bytes| number(*bytes))
    }
    let update = |(sum, element)| update(sum, element);
    let sums = sums.iter_mut();
    match dtype {
        DType::Bfloat16 => sums.zip(read(row, |it| bf16::from_ne_bytes(it).to_f32())).for_each(update),
        DType::Float16 => sums.zip(read(row, |it| f16::from_ne_bytes(it).to_f32())).for_each(update),
        DType::Float32 => sums.zip(read(row, f32::from_ne_bytes)).for_each(update),
        _ => return Err(unsummable(dtype)),
    }
    Ok(())
}

fn unsummable(dtype: DType) -> Error {
    Error::internal(format!("rows of {dtype} cannot be summed"))
}

pub fn f32s(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes))
}

pub fn u32s(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_ne_bytes(*bytes))
}

pub fn i64s(bytes: &[u8]) -> impl Iterator<Item = i64> {
    bytes.as_chunks::<8>().0.iter().map(|bytes| i64::from_ne_bytes(*bytes))
}

pub fn row(rows: &[u8], index: usize, row_bytes: usize) -> Result<&[u8]> {
    range(index, row_bytes).and_then(|range| rows.get(range)).ok_or_else(outside)
}

pub fn copy_row(rows: &mut [u8], index: usize, from: &[u8]) -> Result<()> {
    range(index, from.len()).and_then(|range| rows.get_mut(range)).ok_or_else(outside)?.copy_from_slice(from);
    Ok(())
}

/// The byte range of row `index`, if it does not overflow.
fn range(index: usize, row_bytes: usize) -> Option<Range<usize>> {
    let begin = index.checked_mul(row_bytes)?;
    Some(begin..begin.checked_add(row_bytes)?)
}

fn outside() -> Error {
    Error::internal("a row outside its tensor")
}

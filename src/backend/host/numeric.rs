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
    match dtype {
        DType::Bfloat16 => {
            for (to, sum) in row.chunks_exact_mut(2).zip(sums) {
                to.copy_from_slice(&bf16::from_f32(*sum).to_ne_bytes());
            }
        }
        DType::Float16 => {
            for (to, sum) in row.chunks_exact_mut(2).zip(sums) {
                to.copy_from_slice(&f16::from_f32(*sum).to_ne_bytes());
            }
        }
        DType::Float32 => {
            for (to, sum) in row.chunks_exact_mut(4).zip(sums) {
                to.copy_from_slice(&sum.to_ne_bytes());
            }
        }
        _ => return Err(unsummable(dtype)),
    }
    Ok(())
}

fn for_each(sums: &mut [f32], row: &[u8], dtype: DType, update: impl Fn(&mut f32, f32)) -> Result<()> {
    match dtype {
        DType::Bfloat16 => {
            for (sum, bytes) in sums.iter_mut().zip(row.as_chunks::<2>().0) {
                update(sum, bf16::from_ne_bytes(*bytes).to_f32());
            }
        }
        DType::Float16 => {
            for (sum, bytes) in sums.iter_mut().zip(row.as_chunks::<2>().0) {
                update(sum, f16::from_ne_bytes(*bytes).to_f32());
            }
        }
        DType::Float32 => {
            for (sum, bytes) in sums.iter_mut().zip(row.as_chunks::<4>().0) {
                update(sum, f32::from_ne_bytes(*bytes));
            }
        }
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

pub fn f32_at(bytes: &[u8], index: usize) -> Option<f32> {
    bytes.as_chunks::<4>().0.get(index).map(|bytes| f32::from_ne_bytes(*bytes))
}

pub fn i64_at(bytes: &[u8], index: usize) -> Option<i64> {
    bytes.as_chunks::<8>().0.get(index).map(|bytes| i64::from_ne_bytes(*bytes))
}

pub fn row(rows: &[u8], index: usize, row_bytes: usize) -> Result<&[u8]> {
    range(index, row_bytes).and_then(|range| rows.get(range)).ok_or_else(outside)
}

pub fn copy_row(rows: &mut [u8], index: usize, from: &[u8]) -> Result<()> {
    range(index, from.len()).and_then(|range| rows.get_mut(range)).ok_or_else(outside)?.copy_from_slice(from);
    Ok(())
}

/// The address of row `index`, if it does not overflow.
fn range(index: usize, row_bytes: usize) -> Option<Range<usize>> {
    let begin = index.checked_mul(row_bytes)?;
    Some(begin..begin.checked_add(row_bytes)?)
}

fn outside() -> Error {
    Error::internal("a row outside its tensor")
}

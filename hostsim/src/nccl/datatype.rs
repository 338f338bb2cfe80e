//! NCCL's element types, and element-wise sums over ranks, in ascending order of rank; integers wrap around. NCCL
//! itself adds in another order, so float sums may differ from a GPU's in the last bits.

use std::ffi::c_int;
use std::ops::Add;

use super::error::{Failure, Outcome};

/// Bytes of an element by NCCL's numbers: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64,
/// bfloat16, float8e4m3, float8e5m2.
const SIZES: [usize; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];

#[derive(Clone, Copy)]
pub(crate) struct DataType {
    pub(crate) number: c_int,
    pub(crate) size: usize,
}

/// Sums the inputs, all of the output's length, into the output.
pub(crate) type Sum = fn(inputs: &[&[u8]], out: &mut [u8]);

impl DataType {
    pub(crate) fn from_c(number: c_int) -> Outcome<Self> {
        let size = usize::try_from(number).ok().and_then(|index| SIZES.get(index).copied());
        let size = size.ok_or_else(|| Failure::argument(format!("datatype {number} does not exist")))?;
        Ok(Self { number, size })
    }

    pub(crate) fn bytes(self, count: usize) -> Outcome<usize> {
        let bytes = count.checked_mul(self.size).filter(|bytes| isize::try_from(*bytes).is_ok());
        bytes.ok_or_else(|| Failure::argument(format!("count {count} is too large")))
    }

    /// The sum of elements; only for 32-bit and 64-bit numbers, as programs use no others.
    pub(crate) fn sum(self) -> Option<Sum> {
        Some(match self.number {
            // int32, uint32
            2 | 3 => |inputs, out| sum(inputs, out, u32::from_ne_bytes, u32::wrapping_add, u32::to_ne_bytes),
            // int64, uint64
            4 | 5 => |inputs, out| sum(inputs, out, u64::from_ne_bytes, u64::wrapping_add, u64::to_ne_bytes),
            // float32
            7 => |inputs, out| sum(inputs, out, f32::from_ne_bytes, f32::add, f32::to_ne_bytes),
            // float64
            8 => |inputs, out| sum(inputs, out, f64::from_ne_bytes, f64::add, f64::to_ne_bytes),
            _ => return None,
        })
    }
}

fn sum<N, const BYTES: usize>(
    inputs: &[&[u8]],
    out: &mut [u8],
    read: fn([u8; BYTES]) -> N,
    add: fn(N, N) -> N,
    write: fn(N) -> [u8; BYTES],
) {
    for (index, target) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let values = inputs.iter().map(|input| read(input.as_chunks().0[index]));
        if let Some(total) = values.reduce(add) {
            *target = write(total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<const N: usize>(number: c_int, inputs: &[&[u8]]) -> [u8; N] {
        let mut out = [0; N];
        DataType::from_c(number).ok().and_then(DataType::sum).expect("a sum")(inputs, &mut out);
        out
    }

    #[test]
    fn integers_wrap_around_and_keep_their_sign() {
        let (a, b) = ((-5i64).to_ne_bytes(), 7i64.to_ne_bytes());
        assert_eq!(run(4, &[&a, &b, &a]), (-3i64).to_ne_bytes());
        let (a, b) = (u32::MAX.to_ne_bytes(), 3u32.to_ne_bytes());
        assert_eq!(run(3, &[&a, &b]), 2u32.to_ne_bytes());
    }

    #[test]
    fn floats_are_added_in_the_order_of_ranks() {
        // From the left, the first addend is absorbed by the second; from the right, none is.
        let values = [1.0f32, 1e10, -1e10].map(f32::to_ne_bytes);
        let inputs = values.each_ref().map(<[u8; 4]>::as_slice);
        assert_eq!(run(7, &inputs), 0.0f32.to_ne_bytes());
        let (a, b) = (0.25f64.to_ne_bytes(), 0.5f64.to_ne_bytes());
        assert_eq!(run(8, &[&a, &b]), 0.75f64.to_ne_bytes());
    }
}

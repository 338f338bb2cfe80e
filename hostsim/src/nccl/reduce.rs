//! Element-wise sums over ranks, in ascending order of rank; integers wrap around. Real NCCL adds in
//! an order of its own, so float sums may differ from a GPU's in the last bits.

use super::datatype::DataType;

/// Adds up the inputs, all of the output's length, into the output.
pub(crate) type Sum = fn(inputs: &[&[u8]], out: &mut [u8]);

/// The sum of the elements of a type; only for numbers of 32 and 64 bits, as programs use no others.
pub(crate) fn sum_of(datatype: DataType) -> Option<Sum> {
    Some(match datatype {
        DataType::Int32 | DataType::Uint32 => sum::<u32, 4>,
        DataType::Int64 | DataType::Uint64 => sum::<u64, 8>,
        DataType::Float32 => sum::<f32, 4>,
        DataType::Float64 => sum::<f64, 8>,
        _ => return None,
    })
}

fn sum<N: Number<BYTES>, const BYTES: usize>(inputs: &[&[u8]], out: &mut [u8]) {
    for (index, target) in out.as_chunks_mut().0.iter_mut().enumerate() {
        let values = inputs.iter().map(|input| N::read(input.as_chunks().0[index]));
        *target = values.reduce(N::add).unwrap_or_default().write();
    }
}

/// A number that lies in a buffer as `BYTES` bytes.
trait Number<const BYTES: usize>: Copy + Default {
    fn read(bytes: [u8; BYTES]) -> Self;
    fn add(self, other: Self) -> Self;
    fn write(self) -> [u8; BYTES];
}

macro_rules! number {
    ($($kind:ty, $bytes:literal, $add:expr;)*) => {$(
        impl Number<$bytes> for $kind {
            fn read(bytes: [u8; $bytes]) -> Self {
                Self::from_ne_bytes(bytes)
            }
            fn add(self, other: Self) -> Self {
                $add(self, other)
            }
            fn write(self) -> [u8; $bytes] {
                self.to_ne_bytes()
            }
        }
    )*};
}

number! {
    u32, 4, u32::wrapping_add;
    u64, 8, u64::wrapping_add;
    f32, 4, std::ops::Add::add;
    f64, 8, std::ops::Add::add;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<const N: usize>(datatype: DataType, inputs: &[&[u8]]) -> [u8; N] {
        let mut out = [0; N];
        sum_of(datatype).expect("a sum")(inputs, &mut out);
        out
    }

    #[test]
    fn integers_wrap_around_and_keep_their_sign() {
        let (a, b) = ((-5i64).to_ne_bytes(), 7i64.to_ne_bytes());
        assert_eq!(run(DataType::Int64, &[&a, &b, &a]), (-3i64).to_ne_bytes());
        let (a, b) = (u32::MAX.to_ne_bytes(), 3u32.to_ne_bytes());
        assert_eq!(run(DataType::Uint32, &[&a, &b]), 2u32.to_ne_bytes());
    }

    #[test]
    fn floats_are_added_in_the_order_of_ranks() {
        // From the left, the first addend is lost beside the second; from the right, none is.
        let values = [1.0f32, 1e10, -1e10].map(f32::to_ne_bytes);
        let inputs = values.each_ref().map(<[u8; 4]>::as_slice);
        assert_eq!(run(DataType::Float32, &inputs), 0.0f32.to_ne_bytes());
        let (a, b) = (0.25f64.to_ne_bytes(), 0.5f64.to_ne_bytes());
        assert_eq!(run(DataType::Float64, &[&a, &b]), 0.75f64.to_ne_bytes());
    }
}

//! Element-wise reduction of byte buffers.
//!
//! Ranks are combined in ascending order. Types narrower than 32-bit floats are accumulated in f32
//! and rounded once at the end; integers wrap around. Real NCCL combines in an order of its own,
//! so float results may differ from a GPU's in the last bits.

use half::{bf16, f16};

use super::datatype::{DataType, Operator};
use super::minifloat::{E4M3, E5M2};

/// Reduces the inputs, all of the output's length, into the output.
pub(crate) fn reduce(kind: DataType, operator: Operator, inputs: &[&[u8]], out: &mut [u8]) {
    match kind {
        DataType::Int8 => typed::<i8>(operator, inputs, out),
        DataType::Uint8 => typed::<u8>(operator, inputs, out),
        DataType::Int32 => typed::<i32>(operator, inputs, out),
        DataType::Uint32 => typed::<u32>(operator, inputs, out),
        DataType::Int64 => typed::<i64>(operator, inputs, out),
        DataType::Uint64 => typed::<u64>(operator, inputs, out),
        DataType::Float16 => typed::<f16>(operator, inputs, out),
        DataType::Float32 => typed::<f32>(operator, inputs, out),
        DataType::Float64 => typed::<f64>(operator, inputs, out),
        DataType::Bfloat16 => typed::<bf16>(operator, inputs, out),
        DataType::Float8e4m3 => typed::<Fp8E4M3>(operator, inputs, out),
        DataType::Float8e5m2 => typed::<Fp8E5M2>(operator, inputs, out),
    }
}

fn typed<E: Element>(operator: Operator, inputs: &[&[u8]], out: &mut [u8]) {
    match operator {
        Operator::Sum => fold::<E>(inputs, out, E::Acc::add, |sum| sum),
        Operator::Product => fold::<E>(inputs, out, E::Acc::multiply, |product| product),
        Operator::Max => fold::<E>(inputs, out, E::Acc::larger, |largest| largest),
        Operator::Min => fold::<E>(inputs, out, E::Acc::smaller, |smallest| smallest),
        Operator::Average => fold::<E>(inputs, out, E::Acc::add, |sum| sum.divide(inputs.len())),
    }
}

fn fold<E: Element>(
    inputs: &[&[u8]],
    out: &mut [u8],
    combine: impl Fn(E::Acc, E::Acc) -> E::Acc,
    finish: impl Fn(E::Acc) -> E::Acc,
) {
    let Some((first, others)) = inputs.split_first() else {
        return;
    };
    for (index, target) in out.chunks_exact_mut(E::BYTES).enumerate() {
        let range = index * E::BYTES..(index + 1) * E::BYTES;
        let start = E::load(&first[range.clone()]);
        let all = others.iter().fold(start, |sum, input| {
            combine(sum, E::load(&input[range.clone()]))
        });
        E::store(finish(all), target);
    }
}

/// An element in a byte buffer and the type it is computed in.
trait Element {
    const BYTES: usize;
    type Acc: Arithmetic;
    fn load(bytes: &[u8]) -> Self::Acc;
    fn store(value: Self::Acc, bytes: &mut [u8]);
}

trait Arithmetic: Copy {
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn divide(self, count: usize) -> Self;
}

macro_rules! native_element {
    ($($kind:ty),*) => {$(
        impl Element for $kind {
            const BYTES: usize = size_of::<$kind>();
            type Acc = $kind;
            fn load(bytes: &[u8]) -> $kind {
                let mut raw = [0; size_of::<$kind>()];
                raw.copy_from_slice(bytes);
                <$kind>::from_ne_bytes(raw)
            }
            fn store(value: $kind, bytes: &mut [u8]) {
                bytes.copy_from_slice(&value.to_ne_bytes());
            }
        }
    )*};
}

macro_rules! integer_arithmetic {
    ($($kind:ty),*) => {$(
        impl Arithmetic for $kind {
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            fn divide(self, count: usize) -> Self {
                // A count that the type cannot hold exceeds every value, so the quotient is 0.
                <$kind>::try_from(count).map_or(0, |count| self.wrapping_div(count))
            }
        }
    )*};
}

macro_rules! float_arithmetic {
    ($($kind:ty),*) => {$(
        impl Arithmetic for $kind {
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn multiply(self, other: Self) -> Self {
                self * other
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            fn divide(self, count: usize) -> Self {
                self / count as $kind
            }
        }
    )*};
}

macro_rules! narrow_element {
    ($($kind:ty, $bits:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Element for $kind {
            const BYTES: usize = size_of::<$bits>();
            type Acc = f32;
            fn load(bytes: &[u8]) -> f32 {
                $widen(<$bits as Element>::load(bytes))
            }
            fn store(value: f32, bytes: &mut [u8]) {
                <$bits as Element>::store($narrow(value), bytes);
            }
        }
    )*};
}

struct Fp8E4M3;
struct Fp8E5M2;

native_element!(i8, u8, i32, u32, i64, u64, u16, f32, f64);
integer_arithmetic!(i8, u8, i32, u32, i64, u64, u16);
float_arithmetic!(f32, f64);
narrow_element! {
    f16, u16, |bits| f16::from_bits(bits).to_f32(), |value| f16::from_f32(value).to_bits();
    bf16, u16, |bits| bf16::from_bits(bits).to_f32(), |value| bf16::from_f32(value).to_bits();
    Fp8E4M3, u8, |bits| E4M3.decode(bits), |value| E4M3.encode(value);
    Fp8E5M2, u8, |bits| E5M2.decode(bits), |value| E5M2.encode(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<const N: usize>(kind: DataType, operator: Operator, inputs: &[&[u8]]) -> [u8; N] {
        let mut out = [0; N];
        reduce(kind, operator, inputs, &mut out);
        out
    }

    #[test]
    fn integers_wrap_and_divide() {
        let three: [&[u8]; 3] = [&[100, 1], &[100, 2], &[100, 6]];
        assert_eq!(run(DataType::Uint8, Operator::Sum, &three), [44, 9]);
        assert_eq!(run(DataType::Uint8, Operator::Product, &three), [64, 12]);
        assert_eq!(run(DataType::Uint8, Operator::Max, &three), [100, 6]);
        assert_eq!(run(DataType::Uint8, Operator::Average, &three), [14, 3]);
        let signed: [&[u8]; 2] = [&[0xff], &[1]];
        assert_eq!(run(DataType::Int8, Operator::Min, &signed), [0xff]);
        assert_eq!(run(DataType::Uint8, Operator::Min, &signed), [1]);
    }

    #[test]
    fn wide_types() {
        let (a, b) = ((-5i64).to_ne_bytes(), 7i64.to_ne_bytes());
        assert_eq!(
            run(DataType::Int64, Operator::Product, &[&a, &b]),
            (-35i64).to_ne_bytes()
        );
        let (a, b) = (0.25f64.to_ne_bytes(), 0.5f64.to_ne_bytes());
        assert_eq!(
            run(DataType::Float64, Operator::Average, &[&a, &b]),
            0.375f64.to_ne_bytes()
        );
    }

    #[test]
    fn narrow_floats_round_once() {
        // Each addend alone would vanish beside 256 in bf16; together they do not.
        let bits = |value: f32| bf16::from_f32(value).to_bits().to_ne_bytes();
        let (large, small) = (bits(256.0), bits(0.5));
        let sum = run(
            DataType::Bfloat16,
            Operator::Sum,
            &[&large, &small, &small, &small, &small],
        );
        assert_eq!(sum, bits(258.0));
        let half = |value: f32| f16::from_f32(value).to_bits().to_ne_bytes();
        let product = run(
            DataType::Float16,
            Operator::Product,
            &[&half(1.5), &half(-2.0)],
        );
        assert_eq!(product, half(-3.0));
        let fp8: [&[u8]; 2] = [&[E4M3.encode(2.0)], &[E4M3.encode(3.5)]];
        assert_eq!(
            run(DataType::Float8e4m3, Operator::Sum, &fp8),
            [E4M3.encode(5.5)]
        );
    }
}

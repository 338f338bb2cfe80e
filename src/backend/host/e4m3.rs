//! The cast of rows to e4m3 with scales, in software: the oracle that all kernels must match bit for bit.
//! `docs/formats.md` has the formula.

use crate::model::scales::{Cast, ScaleForm};

/// The maximum assumed for a block of zeros: 1e-4.
const LEAST_MAXIMUM: f32 = f32::from_bits(0x38d1_b717);
/// 1/448 rounded; 448 is the largest number of e4m3.
const INVERSE_MOST: f32 = f32::from_bits(0x3b12_4925);
const MOST: f32 = 448.0;

/// Bits of f32.
const MANTISSA_BITS: u32 = 23;
const INFINITE_EXPONENT: u32 = 0xff;
/// Bits of e4m3: a sign, 4 of exponent (bias 7), 3 of mantissa. The largest number has all bits but
/// the last; NaN has all.
const E4M3_MANTISSA_BITS: u32 = 3;
const E4M3_BIAS: i32 = 7;
const E4M3_MOST: u8 = 0x7e;
const E4M3_NAN: u8 = 0x7f;
/// The exponent of the smallest normal number.
const E4M3_LEAST_EXPONENT: i32 = 1 - E4M3_BIAS;

/// `value` rounded to e4m3, to nearest, ties to even; what exceeds 448, infinities included, becomes 448; NaN becomes
/// 0x7f.
pub fn encode(value: f32) -> u8 {
    if value.is_nan() {
        return E4M3_NAN;
    }
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    sign | magnitude(value.to_bits() & !(1 << 31))
}

/// The same for the bits of a positive number, in integer arithmetic.
fn magnitude(bits: u32) -> u8 {
    if bits >= MOST.to_bits() {
        return E4M3_MOST;
    }
    let exponent = (bits >> MANTISSA_BITS) as i32 - 127;
    let mantissa = bits & ((1 << MANTISSA_BITS) - 1) | 1 << MANTISSA_BITS;
    // A subnormal e4m3 has fewer bits; far below, and for subnormal f32, none.
    let missing = (E4M3_LEAST_EXPONENT - exponent).clamp(0, 8) as u32;
    let drop = MANTISSA_BITS - E4M3_MANTISSA_BITS + missing;
    let kept = mantissa >> drop;
    let rest = mantissa & ((1 << drop) - 1);
    let half = 1 << (drop - 1);
    let up = rest > half || rest == half && kept & 1 != 0;
    // `kept` includes the leading one, which adds 1 to the exponent field.
    let field = (exponent - E4M3_LEAST_EXPONENT).max(0) as u32;
    u8::try_from((field << E4M3_MANTISSA_BITS) + kept + u32::from(up)).unwrap_or(E4M3_MOST).min(E4M3_MOST)
}

/// How the elements of a block are scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Elements are multiplied by it before they are rounded.
    pub factor: f32,
    /// Rounded elements are to be multiplied by it.
    pub stored: f32,
}

impl Scale {
    /// The scale of the block `elements`; NaN elements are ignored.
    pub fn of(elements: impl Iterator<Item = f32>, form: ScaleForm) -> Self {
        // Not `max`, which may return a signalling NaN.
        let most = elements.map(f32::abs).fold(LEAST_MAXIMUM, |most, it| if it > most { it } else { most });
        let stored = most * INVERSE_MOST;
        let power = match form {
            ScaleForm::Float => None,
            ScaleForm::PowerOfTwo | ScaleForm::Exponent => power_above(stored),
        };
        match power {
            Some(exponent) => Self { factor: power_of_two(-exponent), stored: power_of_two(exponent) },
            None => Self { factor: MOST / most, stored },
        }
    }

    /// The exponent byte (UE8M0) of a power of two; 0xff for infinity.
    pub fn exponent_byte(self) -> u8 {
        (self.stored.to_bits() >> MANTISSA_BITS) as u8
    }
}

/// The exponent of the smallest power of two not below `value`; `None` for infinity.
fn power_above(value: f32) -> Option<i32> {
    let bits = value.to_bits();
    let exponent = bits >> MANTISSA_BITS;
    let mantissa = bits & ((1 << MANTISSA_BITS) - 1);
    let power = exponent as i32 - 127 + i32::from(mantissa != 0);
    (exponent != INFINITE_EXPONENT).then_some(power)
}

/// 2^`exponent`, which must be a normal number: scales are between 2^-22 and 2^120.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << MANTISSA_BITS)
}

/// Appends the e4m3 elements of `row` to `payload` and its scales to `scales`, padded with zeros to `scale_bytes`.
pub fn cast_row(row: &[f32], cast: &Cast, scale_bytes: usize, (payload, scales): (&mut Vec<u8>, &mut Vec<u8>)) {
    let end = scales.len() + scale_bytes;
    for block in row.chunks(cast.block) {
        let scale = Scale::of(block.iter().copied(), cast.form);
        payload.extend(block.iter().map(|element| encode(element * scale.factor)));
        match cast.form {
            ScaleForm::Exponent => scales.push(scale.exponent_byte()),
            ScaleForm::Float | ScaleForm::PowerOfTwo => {
                scales.extend(scale.stored.to_ne_bytes());
            }
        }
    }
    scales.resize(end, 0);
}

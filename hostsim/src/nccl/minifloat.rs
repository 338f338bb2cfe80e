//! The two 8-bit float formats, to and from f32.
//!
//! e4m3 has no infinity and one NaN pattern per sign; e5m2 is an IEEE format. Conversion to 8 bits
//! rounds to nearest, ties to even, and saturates, as CUDA's conversions for them do.

/// One 8-bit format.
pub(crate) struct Format {
    mantissa_bits: i32,
    bias: i32,
    largest: f32,
    infinity: Option<u8>,
}

/// 4 exponent bits, 3 mantissa bits.
pub(crate) const E4M3: Format = Format {
    mantissa_bits: 3,
    bias: 7,
    largest: 448.0,
    infinity: None,
};
/// 5 exponent bits, 2 mantissa bits.
pub(crate) const E5M2: Format = Format {
    mantissa_bits: 2,
    bias: 15,
    largest: 57344.0,
    infinity: Some(0x7c),
};

const SIGN: u8 = 0x80;
const NAN: u8 = 0x7f;

impl Format {
    pub(crate) fn decode(&self, bits: u8) -> f32 {
        let magnitude = bits & !SIGN;
        let value = if Some(magnitude) == self.infinity {
            f32::INFINITY
        } else if magnitude == NAN || self.infinity.is_some_and(|infinity| magnitude > infinity) {
            f32::NAN
        } else {
            let exponent = i32::from(magnitude) >> self.mantissa_bits;
            let fraction = i32::from(magnitude) & ((1 << self.mantissa_bits) - 1);
            let hidden = if exponent == 0 {
                0
            } else {
                1 << self.mantissa_bits
            };
            (fraction + hidden) as f32 * self.quantum(exponent.max(1))
        };
        if bits & SIGN != 0 { -value } else { value }
    }

    pub(crate) fn encode(&self, value: f32) -> u8 {
        let sign = if value.is_sign_negative() { SIGN } else { 0 };
        if value.is_nan() {
            return sign | NAN;
        }
        let magnitude = value.abs().min(self.largest);
        // The exponent field of f32 tells the binade; below the format's range it is fixed.
        let binade = (magnitude.to_bits() >> 23) as i32 - 127;
        let exponent = (binade + self.bias).max(1);
        let units = (magnitude / self.quantum(exponent)).round_ties_even() as i32;
        // Counting on from the binade's first pattern carries into the exponent by itself, both
        // when rounding reaches the next binade and out of the subnormal range.
        let first = (exponent - 1) << self.mantissa_bits;
        sign | (first + units) as u8
    }

    /// Distance of neighbouring values at an exponent field.
    fn quantum(&self, exponent: i32) -> f32 {
        f32::powi(2.0, exponent - self.bias - self.mantissa_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_pattern_survives() {
        for format in [E4M3, E5M2] {
            for bits in 0..=u8::MAX {
                let value = format.decode(bits);
                if value.is_finite() {
                    assert_eq!(format.encode(value), bits, "{bits:#x} is {value}");
                }
            }
        }
    }

    #[test]
    fn known_values() {
        assert_eq!(E4M3.decode(0x38), 1.0);
        assert_eq!(E4M3.decode(0x7e), 448.0);
        assert_eq!(E4M3.decode(0x01), 0.001953125);
        assert_eq!(E5M2.decode(0x3c), 1.0);
        assert_eq!(E5M2.decode(0x7b), 57344.0);
        assert_eq!(E5M2.decode(0xfc), f32::NEG_INFINITY);
        assert!(E4M3.decode(0xff).is_nan() && E5M2.decode(0x7d).is_nan());
    }

    #[test]
    fn rounds_to_even_and_saturates() {
        // Between 16 and 32, e4m3 steps by 2.
        assert_eq!(E4M3.decode(E4M3.encode(17.0)), 16.0);
        assert_eq!(E4M3.decode(E4M3.encode(19.0)), 20.0);
        assert_eq!(E4M3.decode(E4M3.encode(31.5)), 32.0);
        assert_eq!(E4M3.decode(E4M3.encode(-1e9)), -448.0);
        assert_eq!(E5M2.decode(E5M2.encode(f32::INFINITY)), 57344.0);
        assert_eq!(E4M3.encode(1e-9), 0);
        assert_eq!(E4M3.encode(-0.0), SIGN);
        assert_eq!(E4M3.encode(f32::NAN), NAN);
    }
}

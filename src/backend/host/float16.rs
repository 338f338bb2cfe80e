//! bf16 and f16 as bits: to f32 without loss, and back to the nearest, ties to even.
//!
//! A NaN stays one with its sign and upper bits, and is quiet then, as the CPU's own conversions have it.
#![forbid(unsafe_code)]

const SIGN: u32 = 1 << 31;
const INFINITY: u32 = 0x7f80_0000;
/// Of f32's exponent against f16's, in the place of f16's exponent.
const F16_BIAS: u32 = (127 - 15) << 10;

pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(quiet(u32::from(bits) << 16))
}

pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = quiet(value.to_bits());
    if value.is_nan() {
        return (bits >> 16) as u16;
    }
    shift_to_nearest(bits, 16) as u16
}

pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    if magnitude >= 0x7c00 << 13 {
        return f32::from_bits(quiet(sign | INFINITY | magnitude));
    }
    // Read as f32, numbers are too small by the difference of the biases; a product by a power of two is exact.
    let scale = f32::from_bits((127 + 127 - 15) << 23);
    f32::from_bits(sign | (f32::from_bits(magnitude) * scale).to_bits())
}

pub fn f32_to_f16(value: f32) -> u16 {
    const BEYOND: u32 = 0x4780_0000; // 2^16
    const NORMAL: u32 = 0x3880_0000; // 2^-14
    let sign = (value.to_bits() & SIGN) >> 16;
    let magnitude = quiet(value.to_bits() & !SIGN);
    let rounded = if value.is_nan() {
        0x7c00 | (magnitude >> 13 & 0x3ff)
    } else if magnitude >= BEYOND {
        0x7c00
    } else if magnitude >= NORMAL {
        shift_to_nearest(magnitude, 13) - F16_BIAS
    } else {
        // The unit in the last place of 0.5 is that of f16's subnormal numbers.
        (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5_f32.to_bits()
    };
    (sign | rounded) as u16
}

/// The bits of a number, or of a quiet NaN in the place of a signalling one.
fn quiet(bits: u32) -> u32 {
    let is_nan = bits & !SIGN > INFINITY;
    bits | u32::from(is_nan) << 22
}

fn shift_to_nearest(bits: u32, count: u32) -> u32 {
    let half = 1 << (count - 1);
    (bits + (half - 1) + (bits >> count & 1)) >> count
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A format: how its bits are read, how f32 is rounded to it, and the bits of infinity.
    type Format = (fn(u16) -> f32, fn(f32) -> u16, u16);
    const FORMATS: [Format; 2] = [
        (bf16_to_f32, f32_to_bf16, 0x7f80),
        (f16_to_f32, f32_to_f16, 0x7c00),
    ];

    #[test]
    fn known_numbers() {
        let f16 = [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0400, 2.0_f32.powi(-14)),
            (0x03ff, 1023.0 * 2.0_f32.powi(-24)),
            (0x8001, -(2.0_f32.powi(-24))),
            (0x7c00, f32::INFINITY),
        ];
        for (bits, value) in f16 {
            assert_eq!((f16_to_f32(bits), f32_to_f16(value)), (value, bits));
        }
        for (bits, value) in [
            (0x3f80, 1.0),
            (0xc2f7, -123.5),
            (0x0001, f32::from_bits(1 << 16)),
        ] {
            assert_eq!((bf16_to_f32(bits), f32_to_bf16(value)), (value, bits));
        }
        assert_eq!(f32_to_f16(-0.0), 0x8000);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
    }

    #[test]
    fn every_number_returns_and_rounding_is_to_the_nearest_even() {
        for (read, round, infinity) in FORMATS {
            for bits in 0..infinity {
                let value = read(bits);
                assert_eq!((round(value), round(-value)), (bits, bits | 0x8000));
                // Beyond the largest number as if the exponent had no end.
                let step = if bits + 1 < infinity {
                    f64::from(read(bits + 1)) - f64::from(value)
                } else {
                    f64::from(value) - f64::from(read(bits - 1))
                };
                let middle = (f64::from(value) + step / 2.0) as f32;
                let even = bits + bits % 2;
                assert_eq!(round(middle), even, "{bits:#x}");
                assert_eq!(
                    round(f32::from_bits(middle.to_bits() - 1)),
                    bits,
                    "{bits:#x}"
                );
                assert_eq!(
                    round(f32::from_bits(middle.to_bits() + 1)),
                    bits + 1,
                    "{bits:#x}"
                );
            }
        }
    }

    #[test]
    fn a_nan_stays_one_and_is_quiet() {
        for (read, round, infinity) in FORMATS {
            let first = infinity | (infinity ^ 0x7fff).div_ceil(2);
            for bits in infinity + 1..0x8000 {
                assert_eq!(round(read(bits)), bits | first, "{bits:#x}");
                assert_eq!(
                    round(read(bits | 0x8000)),
                    bits | first | 0x8000,
                    "{bits:#x}"
                );
            }
            assert!(read(round(f32::from_bits(0x7f80_0001))).is_nan());
        }
    }
}

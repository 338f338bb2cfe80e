//! Unit tests of the cast: all inputs against a slow reference that only compares numbers.

use super::*;
use crate::model::tensor::DType;
use half::bf16;

/// The value of an e4m3, from its fields; NaN for 0x7f and 0xff.
fn decode(byte: u8) -> f64 {
    let (field, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let value = match field {
        0 => mantissa / 8.0 * 2_f64.powi(-6),
        15 if byte & 7 == 7 => f64::NAN,
        _ => (1.0 + mantissa / 8.0) * 2_f64.powi(field - 7),
    };
    if byte < 0x80 { value } else { -value }
}

/// The nearest e4m3 by comparing with all of them; of two the one with an even last bit.
fn nearest(value: f32) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    let distance = |byte: u8| (decode(byte) - f64::from(value.abs()).min(448.0)).abs();
    let magnitude = (0..0x7f).fold(0, |best: u8, byte: u8| {
        let (old, new) = (distance(best), distance(byte));
        let is_better = new < old || new == old && byte.is_multiple_of(2);
        if is_better { byte } else { best }
    });
    magnitude | u8::from(value.is_sign_negative()) << 7
}

fn all_bf16() -> impl Iterator<Item = f32> {
    (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32())
}

#[test]
fn all_bf16_are_rounded_to_the_nearest_at_many_factors() {
    let factors = [1.0, 448.0, 2_f32.powi(22), 1.0 / 3.0, 7.7e-5, 2_f32.powi(-100), 2_f32.powi(100)];
    for factor in factors {
        for value in all_bf16() {
            let product = value * factor;
            assert_eq!(encode(product), nearest(product), "{value:e} * {factor:e}");
        }
    }
}

#[test]
fn every_e4m3_is_itself_and_every_middle_goes_to_the_even_one() {
    for byte in 0..0x7e_u8 {
        let (low, high) = (decode(byte), decode(byte + 1));
        let middle = ((low + high) / 2.0) as f32;
        assert_eq!(f64::from(middle), (low + high) / 2.0);
        let even = byte + byte % 2;
        for (value, expected) in
            [(low as f32, byte), (middle.next_down(), byte), (middle, even), (middle.next_up(), byte + 1)]
        {
            assert_eq!(encode(value), expected, "{value:e}");
            assert_eq!(encode(-value), expected | 0x80, "-{value:e}");
        }
    }
}

#[test]
fn the_ends_of_the_range() {
    for (value, expected) in [
        (0.0, 0),
        (-0.0, 0x80),
        (f32::MIN_POSITIVE, 0),
        (f32::from_bits(1), 0),
        (-f32::from_bits(1), 0x80),
        // Half of the smallest subnormal is a tie with 0.
        (2_f32.powi(-10), 0),
        (2_f32.powi(-10).next_up(), 1),
        (2_f32.powi(-9), 1),
        (448.0, 0x7e),
        (464.0, 0x7e),
        (1e30, 0x7e),
        (f32::INFINITY, 0x7e),
        (f32::NEG_INFINITY, 0xfe),
        (f32::NAN, 0x7f),
        (-f32::NAN, 0x7f),
    ] {
        assert_eq!(encode(value), expected, "{value:e}");
    }
}

/// Payload and scales of one row.
fn cast(row: &[f32], block: usize, form: ScaleForm, scale_bytes: usize) -> (Vec<u8>, Vec<u8>) {
    let cast = Cast { from: DType::Float32, block, form };
    let (mut payload, mut scales) = (Vec::new(), Vec::new());
    cast_row(row, &cast, scale_bytes, (&mut payload, &mut scales));
    (payload, scales)
}

fn float(scales: &[u8], index: usize) -> f32 {
    f32::from_ne_bytes(*scales.as_chunks::<4>().0.get(index).unwrap())
}

/// The scale of one block.
fn scale(block: &[f32], form: ScaleForm) -> Scale {
    Scale::of(block.iter().copied(), form)
}

#[test]
fn scales_have_the_bits_of_the_formula() {
    assert_eq!(scale(&[0.0, -0.0], ScaleForm::Float).stored.to_bits(), 0x346f_acad);
    assert_eq!(scale(&[0.0, -0.0], ScaleForm::PowerOfTwo).stored, 2_f32.powi(-22));
    let one = scale(&[0.5, -1.0], ScaleForm::Float);
    assert_eq!((one.stored.to_bits(), one.factor), (0x3b12_4925, 448.0));
}

#[test]
fn powers_of_two_are_the_least_that_hold_the_maximum() {
    for k in -14_i32..=100 {
        let exact = 448.0 * 2_f32.powi(k);
        for (most, expected) in [(exact, k), (exact * (1.0 + 2_f32.powi(-7)), k + 1)] {
            let scale = scale(&[most], ScaleForm::Exponent);
            assert_eq!(scale.stored, 2_f32.powi(expected));
            assert_eq!(scale.factor, 2_f32.powi(-expected));
            assert_eq!(i32::from(scale.exponent_byte()), expected + 127);
        }
    }
    assert_eq!(scale(&[f32::MAX], ScaleForm::Exponent).stored, 2_f32.powi(120));
}

/// By the definition: the scale of one bf16 in f64, where the product and quotient of two f32 are
/// exact enough to be rounded once more.
#[test]
fn all_bf16_have_the_scale_of_the_definition() {
    for value in all_bf16().filter(|value| value.is_finite()) {
        let most = f64::from(value.abs()).max(f64::from(LEAST_MAXIMUM));
        let stored = (most * f64::from(INVERSE_MOST)) as f32;
        let float = scale(&[value], ScaleForm::Float);
        assert_eq!((float.stored, float.factor), (stored, (448.0 / most) as f32));
        let power = scale(&[value], ScaleForm::PowerOfTwo).stored;
        assert!(power >= stored && power < 2.0 * stored, "{value:e}");
    }
}

#[test]
fn not_a_number_stays_alone() {
    let row = [f32::NAN, 448.0, -224.0, 0.0];
    let (payload, scales) = cast(&row, 128, ScaleForm::Float, 4);
    assert_eq!(payload, [0x7f, 0x7e, encode(-224.0), 0]);
    assert_eq!(float(&scales, 0), 448.0 * INVERSE_MOST);
    for nan in [0x7f80_0001, 0x7fff_ffff, 0xff80_0001, 0xffff_ffff].map(f32::from_bits) {
        for row in [[nan, 2.0, 1.0], [2.0, nan, 1.0], [2.0, 1.0, nan]] {
            let scale = scale(&row, ScaleForm::Float);
            assert_eq!((scale.factor, scale.stored), (224.0, 2.0 * INVERSE_MOST));
        }
    }
    assert_eq!(scale(&[f32::NAN], ScaleForm::Float).stored.to_bits(), 0x346f_acad);
}

#[test]
fn an_infinity_spoils_its_block() {
    let row = [f32::NEG_INFINITY, 1.0, -1.0, f32::NAN];
    for form in [ScaleForm::Float, ScaleForm::PowerOfTwo] {
        let (payload, scales) = cast(&row, 128, form, 4);
        assert_eq!(payload, [0x7f, 0, 0x80, 0x7f]);
        assert_eq!(float(&scales, 0), f32::INFINITY);
    }
    let (payload, scales) = cast(&row, 128, ScaleForm::Exponent, 4);
    assert_eq!(payload, [0x7f, 0, 0x80, 0x7f]);
    assert_eq!(scales, [0xff, 0, 0, 0]);
}

#[test]
fn the_last_block_may_be_short_and_missing_blocks_are_zero() {
    let mut row = vec![1.0; 144];
    row.extend([448.0]);
    let (payload, scales) = cast(&row, 128, ScaleForm::Exponent, 4);
    assert_eq!(payload.len(), 145);
    assert_eq!(scales, [119, 127, 0, 0]);
    assert_eq!(payload.last(), Some(&0x7e));
    let (_, scales) = cast(&row, 32, ScaleForm::Exponent, 8);
    assert_eq!(scales, [119, 119, 119, 119, 127, 0, 0, 0]);
}

/// The bound that callers may rely on.
#[test]
fn casts_are_as_near_as_promised() {
    for form in [ScaleForm::Float, ScaleForm::PowerOfTwo] {
        let values: Vec<f32> = all_bf16().filter(|it| it.is_finite()).collect();
        for block in values.chunks(96) {
            let scale = scale(block, form);
            for &value in block {
                let back = decode(encode(value * scale.factor)) * f64::from(scale.stored);
                let error = (back - f64::from(value)).abs();
                let value = f64::from(value.abs());
                let stored = f64::from(scale.stored);
                // Half a step, and the roundings of the scale and of the product.
                assert!(error <= (value / 16.0).max(stored / 1024.0) * 1.000_001, "{value:e}");
            }
        }
    }
}

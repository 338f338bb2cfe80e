//! Unit tests: which casts exist, and which strides are valid layouts of scales.

use super::*;

fn cast(dtype: DType, count: usize, hidden: usize, round: bool) -> Option<(usize, ScaleForm)> {
    let cast = Cast::new(DType::Bfloat16, hidden, ScaleType { dtype, count }, round);
    cast.map(|cast| (cast.block, cast.form))
}

#[test]
fn the_type_and_number_of_scales_choose_the_cast() {
    use ScaleForm::{Exponent, Float, PowerOfTwo};
    for round in [false, true] {
        let float = if round { PowerOfTwo } else { Float };
        assert_eq!(cast(DType::Float32, 56, 7168, round), Some((128, float)));
        assert_eq!(cast(DType::Float32, 224, 7168, round), None);
        let bytes = |count| cast(DType::Uint8, count, 7168, round);
        assert_eq!(bytes(56), Some((128, Exponent)));
        assert_eq!(bytes(224), Some((32, Exponent)));
        assert_eq!(bytes(55), None);
        for dtype in [DType::Int32, DType::Uint32] {
            assert_eq!(cast(dtype, 14, 7168, round), Some((128, Exponent)));
            assert_eq!(cast(dtype, 56, 7168, round), Some((32, Exponent)));
        }
    }
    assert_eq!(cast(DType::Bfloat16, 56, 7168, false), None);
}

#[test]
fn a_short_last_block_has_its_scale() {
    // 2880 = 22.5 * 128 = 90 * 32.
    assert_eq!(cast_counts(DType::Float32, 2880), Some((23, None)));
    assert_eq!(cast_counts(DType::Uint8, 2880), Some((23, Some(90))));
    assert_eq!(cast_counts(DType::Int32, 2880), Some((6, Some(23))));
    for (dtype, count) in [(DType::Float32, 23), (DType::Uint8, 23), (DType::Int32, 6)] {
        assert_eq!(cast(dtype, count, 2880, false).map(|it| it.0), Some(128));
    }
    // If both block sizes give the same number of scales, the larger one applies.
    assert_eq!(cast(DType::Uint8, 1, 16, false).map(|it| it.0), Some(128));
    assert_eq!(cast(DType::Int32, 1, 128, false).map(|it| it.0), Some(128));
    assert_eq!(cast(DType::Int32, 2, 144, false).map(|it| it.0), Some(32));
}

#[test]
fn a_slot_is_payload_and_padded_scales() {
    let payload = RowType { dtype: DType::Float8E4M3, hidden: 2880 };
    let row = WireRow { payload, scales: Some(ScaleType { dtype: DType::Float32, count: 23 }) };
    assert_eq!((row.scale_bytes(), row.slot_bytes()), (92, 2976));
    assert_eq!(WireRow::from(payload).slot_bytes(), 2880);
}

fn layout(sizes: [usize; 3], strides: [usize; 3]) -> Option<[usize; 3]> {
    let layout = ScaleLayout::new(sizes, Some(strides))?;
    Some([layout.expert, layout.row, layout.column])
}

#[test]
fn scales_are_row_major_or_column_major() {
    let sizes = [2, 24, 56];
    assert_eq!(ScaleLayout::new(sizes, None).unwrap().element(1, 2, 3), 24 * 56 + 2 * 56 + 3);
    for strides in [[24 * 56, 56, 1], [24 * 64, 64, 1], [5000, 64, 1], [24 * 56, 1, 24], [28 * 56, 1, 28]] {
        assert_eq!(layout(sizes, strides), Some(strides));
    }
    for strides in [
        [24 * 56, 55, 1],
        [24 * 56 - 1, 56, 1],
        [24 * 56, 1, 23],
        [28 * 56 - 1, 1, 28],
        [57344, 2, 512],
        [24 * 56, 0, 1],
        [24 * 56, 1, 0],
        [0, 56, 1],
        [1, 1, 1],
    ] {
        assert_eq!(layout(sizes, strides), None, "{strides:?}");
    }
}

#[test]
fn a_dimension_of_one_element_may_have_any_stride() {
    assert!(layout([1, 24, 56], [0, 56, 1]).is_some());
    assert!(layout([2, 1, 56], [56, 0, 1]).is_some());
    assert!(layout([2, 1, 56], [112, 7, 2]).is_some());
    assert!(layout([2, 1, 56], [111, 7, 2]).is_none());
    assert!(layout([2, 24, 1], [24, 1, 0]).is_some());
    assert!(layout([2, 24, 1], [72, 3, 0]).is_some());
    assert!(layout([2, 24, 1], [71, 3, 0]).is_none());
    assert!(layout([2, 24, 1], [72, 0, 1]).is_none());
    assert!(layout([1, 1, 1], [0, 0, 0]).is_some());
    assert!(layout([2, 1, 1], [0, 1, 1]).is_none());
    assert!(layout([0, 24, 56], [0, 0, 0]).is_some());
}

/// No two elements of an accepted layout share memory.
#[test]
fn accepted_layouts_do_not_overlap() {
    for sizes in [[2, 3, 2], [2, 1, 3], [2, 3, 1], [1, 2, 2], [3, 1, 1]] {
        for code in 0..8 * 5 * 5 {
            let strides = [code / 25 * 2, code / 5 % 5, code % 5];
            let Some(layout) = ScaleLayout::new(sizes, Some(strides)) else { continue };
            let mut seen = Vec::new();
            for index in 0..sizes.iter().product() {
                let [_, rows, columns] = sizes;
                let (expert, rest) = (index / (rows * columns), index % (rows * columns));
                let element = layout.element(expert, rest / columns, rest % columns);
                assert!(!seen.contains(&element), "{sizes:?} {strides:?}");
                seen.push(element);
            }
        }
    }
}

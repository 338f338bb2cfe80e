//! Unit tests of casts and forwarded scales; `c_tests/suites/errors/scales.c` has the refusals.

use super::*;
use crate::model::ops::{HandleForm, IntWidth};
use crate::model::tensor::Tensor;

const TOKENS: usize = 4;
const HIDDEN: usize = 256;
const EXPERTS: usize = 2;
const SLOTS: usize = 12;

/// An LL dispatch of rows of `from` to rows of `to`, with scales of these types; `count` columns arrive.
fn check(from: DType, to: DType, sent: Option<DType>, (out, count): (DType, usize)) -> Result<DispatchRows> {
    let tensor = |dtype, sizes: &[usize]| {
        let sizes: Vec<u32> = sizes.iter().map(|&size| size as u32).collect();
        Tensor::new(DevPtr(0x1000), Some(dtype), &sizes)
    };
    let facts = GroupFacts { experts: 4, max_tokens: Some(6), row_bytes: 2 * HIDDEN, ..GroupFacts::SAMPLE };
    let (ids, form) = (DevPtr(16), HandleForm::default());
    let routing = Routing { ids, width: IntWidth::Bits64, tokens: TOKENS, top_k: 2, form };
    let (tokens, rows) = (tensor(from, &[TOKENS, HIDDEN]), tensor(to, &[EXPERTS, SLOTS, HIDDEN]));
    let (scales, out_scales) = (sent.map(|it| tensor(it, &[TOKENS, count])), tensor(out, &[EXPERTS, SLOTS, count]));
    let tensors = DispatchTensors {
        tokens: Some(&tokens),
        scales: scales.as_ref(),
        out_tokens: Some(&rows),
        out_scales: Some(&out_scales),
        ..DispatchTensors::default()
    };
    let layout = Layout::ExpertMajor { experts: EXPERTS, slots: SLOTS };
    let received = Received { out: Some(Argument::new(Role::TokensOut, &rows)), layout };
    dispatch(&facts, &routing, (Argument::new(Role::TokensIn, &tokens), received), &tensors)
}

#[test]
fn ranks_may_differ_in_the_sign_of_exponents() {
    for stored in [DType::Int32, DType::Uint32] {
        let scaled = check(DType::Bfloat16, DType::Uint8, None, (stored, 2)).unwrap().scaled.unwrap();
        assert_eq!((scaled.scales.dtype, scaled.scales.count), (DType::Int32, 2));
    }
}

#[test]
fn rows_without_columns_of_scales_have_none() {
    let float = DType::Float32;
    assert_eq!(check(DType::Uint8, DType::Uint8, Some(float), (float, 0)).unwrap().scaled, None);
}

#[test]
fn both_numbers_of_blocks_are_told() {
    let refused = check(DType::Bfloat16, DType::Uint8, None, (DType::Uint8, 3)).unwrap_err();
    assert_eq!(refused.text(), "Size(ScalesOut, 2): OfTensor(Exactly(Blocks)) (got 3, expected 2 or 8)");
}

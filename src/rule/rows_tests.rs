//! Unit tests: the refusals of rows with scales, and what accepted ones become.

use super::*;
use crate::model::group::LlCombineMode;
use crate::model::ops::{HandleForm, IntWidth};
use crate::model::scales::ScaleForm;
use crate::model::tensor::Tensor;

const TOKENS: usize = 4;
const HIDDEN: usize = 256;
const EXPERTS: usize = 2;
const SLOTS: usize = 12;

fn facts() -> GroupFacts {
    GroupFacts {
        experts: 4,
        max_tokens: Some(6),
        max_recv_rows: Some(SLOTS),
        row_bytes: 2 * HIDDEN,
        ll_combine: LlCombineMode::Reduce,
        ..GroupFacts::SAMPLE
    }
}

fn tensor(dtype: DType, sizes: &[usize]) -> Tensor {
    let sizes: Vec<u32> = sizes.iter().map(|&size| size as u32).collect();
    Tensor::new(DevPtr(0x1000), Some(dtype), &sizes)
}

/// The tensors of an LL dispatch.
#[derive(Clone, Copy)]
struct Call {
    tokens: Tensor,
    scales: Option<Tensor>,
    out: Tensor,
    out_scales: Option<Tensor>,
    out_strides: Option<Strides>,
    round_scales: u32,
}

impl Call {
    fn new(from: DType, to: DType) -> Self {
        Self {
            tokens: tensor(from, &[TOKENS, HIDDEN]),
            scales: None,
            out: tensor(to, &[EXPERTS, SLOTS, HIDDEN]),
            out_scales: None,
            out_strides: None,
            round_scales: 0,
        }
    }

    fn cast(to: DType, stored: DType, count: usize) -> Self {
        Self { out_scales: Some(tensor(stored, &[EXPERTS, SLOTS, count])), ..Self::new(DType::Bfloat16, to) }
    }

    fn forward(dtype: DType, count: usize) -> Self {
        Self {
            scales: Some(tensor(dtype, &[TOKENS, count])),
            out_scales: Some(tensor(dtype, &[EXPERTS, SLOTS, count])),
            ..Self::new(DType::Uint8, DType::Uint8)
        }
    }

    fn check(&self) -> Result<DispatchRows> {
        let routing =
            Routing { ids: DevPtr(16), width: IntWidth::Bits64, tokens: TOKENS, top_k: 2, form: HandleForm::default() };
        let tensors = DispatchTensors {
            tokens: Some(&self.tokens),
            scales: self.scales.as_ref(),
            out_tokens: Some(&self.out),
            out_scales: self.out_scales.as_ref(),
            out_scale_strides: self.out_strides.as_ref(),
            round_scales: self.round_scales,
            ..DispatchTensors::default()
        };
        let received = Received {
            out: Some(Argument::new(Role::TokensOut, &self.out)),
            layout: Layout::ExpertMajor { experts: EXPERTS, slots: SLOTS },
        };
        let tokens = Argument::new(Role::TokensIn, &self.tokens);
        dispatch(&facts(), &routing, (tokens, received), &tensors)
    }

    fn refusal(&self) -> String {
        self.check().err().map(|error| error.text()).unwrap()
    }
}

#[test]
fn rows_of_every_type_pass() {
    for dtype in DType::ALL {
        let hidden = 512 / dtype.size();
        let call = Call {
            tokens: tensor(dtype, &[TOKENS, hidden]),
            out: tensor(dtype, &[EXPERTS, SLOTS, hidden]),
            ..Call::new(dtype, dtype)
        };
        let rows = call.check().unwrap();
        assert_eq!((rows.row, rows.scaled), (RowType { dtype, hidden }, None));
    }
}

#[test]
fn scales_that_are_sent_arrive_as_they_are() {
    for (dtype, count) in [(DType::Float32, 2), (DType::Uint8, 7), (DType::Bfloat16, 1)] {
        let scaled = Call::forward(dtype, count).check().unwrap().scaled.unwrap();
        assert_eq!(scaled.scales, ScaleType { dtype, count });
        assert_eq!(scaled.cast(), None);
    }
    assert_eq!(Call::forward(DType::Float32, 0).check().unwrap().scaled, None);
}

#[test]
fn scales_that_nobody_sends_are_made() {
    let rows = Call::cast(DType::Uint8, DType::Uint32, 2).check().unwrap();
    assert_eq!(rows.row.dtype, DType::Float8E4M3);
    let scaled = rows.scaled.unwrap();
    assert_eq!((scaled.scales.dtype, scaled.scales.count), (DType::Int32, 2));
    let cast = scaled.cast().unwrap();
    assert_eq!((cast.block, cast.form), (32, ScaleForm::Exponent));
    let rounded = Call { round_scales: 1, ..Call::cast(DType::Float8E4M3, DType::Float32, 2) };
    assert_eq!(rounded.check().unwrap().scaled.unwrap().cast().unwrap().form, ScaleForm::PowerOfTwo);
}

#[test]
fn each_broken_rule_is_named() {
    let unsent = Call { out_scales: None, ..Call::forward(DType::Float32, 2) };
    assert_eq!(unsent.refusal(), "Tensor(ScalesOut): OfTensor(ScalesReceived)");
    let uncast = Call { scales: None, ..Call::forward(DType::Float32, 2) };
    assert!(uncast.refusal().starts_with("Tensor(ScalesIn): OfTensor(ScalesSent) (got uint8,"));
    let cases = [
        (
            Call::new(DType::Bfloat16, DType::Float16),
            "ElementType(TokensOut): OfTensor(SameTypeOrCast) (got float16, expected bfloat16)",
        ),
        (
            Call::cast(DType::Float8E5M2, DType::Float32, 2),
            "ElementType(TokensOut): OfTensor(CastToE4m3) (got float8e5m2, expected float8e4m3)",
        ),
        (
            Call::cast(DType::Uint8, DType::Float16, 2),
            "ElementType(ScalesOut): OfTensor(CastScaleType) (got float16, expected float32, \
             uint8, int32 or uint32)",
        ),
        (
            Call::cast(DType::Uint8, DType::Uint8, 3),
            "Size(ScalesOut, 2): OfTensor(Exactly(Blocks)) (got 3, expected 2 or 8)",
        ),
        (
            Call::cast(DType::Uint8, DType::Float32, 8),
            "Size(ScalesOut, 2): OfTensor(Exactly(Blocks)) (got 8, expected 2)",
        ),
        (
            Call::forward(DType::Int64, 2),
            "ElementType(ScalesIn): OfTensor(ScaleWidth) (got int64, expected a type of 1, 2 or \
             4 bytes)",
        ),
        (
            Call::forward(DType::Float32, 65),
            "Size(TokensIn, 1): OfTensor(RowAndScalesBound) (got 528 bytes, expected at most 512 \
             bytes)",
        ),
        (
            Call { round_scales: 2, ..Call::forward(DType::Float32, 2) },
            "RoundScales: OfTensor(ForwardedAsIs) (got 2, expected 0)",
        ),
    ];
    for (call, text) in cases {
        assert_eq!(call.refusal(), text);
    }
}

#[test]
fn received_scales_have_the_shape_of_received_rows() {
    let with = |dtype, sizes: [usize; 3]| {
        let out_scales = Some(tensor(dtype, &sizes));
        let call = Call::forward(DType::Float32, 2);
        Call { out_scales, ..call }.refusal()
    };
    let float = DType::Float32;
    let starts = [
        (with(float, [1, SLOTS, 2]), "Size(ScalesOut, 0): OfTensor(Exactly(ExpertsOf("),
        (with(float, [EXPERTS, 1, 2]), "Size(ScalesOut, 1): OfTensor(Exactly(RowsOf("),
        (with(float, [EXPERTS, SLOTS, 3]), "Size(ScalesOut, 2): OfTensor(Exactly(ColumnsOf("),
        (with(DType::Int32, [EXPERTS, SLOTS, 2]), "ElementType(ScalesOut): OfTensor(TypeOf("),
    ];
    for (text, start) in starts {
        assert!(text.starts_with(start), "{text}");
    }
}

#[test]
fn strides_are_a_pitch() {
    let with = |strides: [u32; 3]| {
        let mut call = Call::cast(DType::Uint8, DType::Float32, 2);
        call.out_strides = Some(Strides::new(&strides));
        call.check()
    };
    assert_eq!(with([32, 1, 16]).unwrap().scaled.unwrap().out.layout.element(1, 2, 1), 32 + 2 + 16);
    let error = with([48, 2, 24]).err().unwrap();
    assert_eq!(
        error.text(),
        "Strides(ScalesOut): OfTensor(Pitched) (got [48, 2, 24], expected pitches for 12 rows of \
         2 scales)"
    );
}

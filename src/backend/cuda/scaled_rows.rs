//! Kernel parameters of rows with scales, and the word by which ranks compare their scales.

use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::params::common::{ScaleView, ScaledRows, Scales};
use crate::error::Result;
use crate::model::ops::RowType;
use crate::model::scales::{Cast, ScaleForm, ScaleSource, ScaleTensor, ScaleType, Scaled, WireRow};
use crate::model::tensor::DType;
use std::ptr::null_mut;

/// The parameters of rows `row` with scales `scaled`; LL adds its chunks.
pub fn scaled_rows(row: RowType, scaled: &Scaled) -> Result<ScaledRows> {
    let (form, block, from) = match &scaled.source {
        ScaleSource::Forward(from) => (Scales::Forwarded, 0, view(from)),
        ScaleSource::Cast(cast) => (form(cast), to_u32(cast.block)?, NO_VIEW),
    };
    Ok(ScaledRows {
        payload_bytes: to_u32(row.bytes())?,
        scale_bytes: to_u32(scaled.scales.bytes())?,
        scale_width: to_u32(scaled.scales.dtype.size())?,
        form,
        block,
        scale_chunk_bytes: 0,
        from,
        out: view(&scaled.out),
    })
}

/// The view if there is no tensor of scales.
pub const NO_VIEW: ScaleView = ScaleView { data: null_mut(), expert: 0, row: 0, column: 0 };

fn view(tensor: &ScaleTensor) -> ScaleView {
    ScaleView {
        data: tensor.data.0 as *mut u8,
        expert: tensor.layout.expert as u64,
        row: tensor.layout.row as u64,
        column: tensor.layout.column as u64,
    }
}

fn form(cast: &Cast) -> Scales {
    match cast.form {
        ScaleForm::Float => Scales::Float,
        ScaleForm::PowerOfTwo => Scales::PowerOfTwo,
        ScaleForm::Exponent => Scales::Exponent,
    }
}

/// What ranks must agree on about a dispatch's scales, in a word that kernels only compare; 0 without scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScalesWord(pub u32);

/// The element type is above this bit; below are the bytes of a row's scales.
const TYPE_SHIFT: u32 = 28;

const _: () = assert!((DType::LAST as u32) < 1 << (u32::BITS - TYPE_SHIFT));

/// The most bytes of a row's scales that the word can express.
pub const MOST_SCALE_BYTES: usize = (1 << TYPE_SHIFT) - 1;

impl ScalesWord {
    /// The word for rows that travel as `row`.
    #[inline]
    pub fn of(row: WireRow) -> Self {
        row.scales.map_or_else(Self::default, Self::new)
    }

    /// The word for rows with at least one of `scales`.
    pub fn new(scales: ScaleType) -> Self {
        // Never clamps: rows, which include their scales, have a smaller bound.
        let bytes = scales.bytes().min(MOST_SCALE_BYTES) as u32;
        Self((scales.dtype as u32) << TYPE_SHIFT | bytes)
    }

    pub fn bytes(self) -> usize {
        (self.0 & MOST_SCALE_BYTES as u32) as usize
    }

    /// The name of the scales' type; a word from a peer may have arbitrary bits.
    pub fn type_name(self) -> String {
        let number = self.0 >> TYPE_SHIFT;
        DType::from_raw(number).map_or_else(|| format!("type {number}"), |dtype| dtype.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_names_bytes_and_type() {
        let word = |dtype, count| ScalesWord::new(ScaleType { dtype, count });
        let float = word(DType::Float32, 56);
        assert_eq!((float.bytes(), float.type_name().as_str()), (224, "float32"));
        let int8 = word(DType::Int8, 1);
        assert_eq!((int8.bytes(), int8.type_name().as_str()), (1, "int8"));
        assert_ne!(int8, ScalesWord::default());
        assert_ne!(word(DType::Uint8, 224), float);
        assert_eq!(ScalesWord(u32::MAX).type_name(), "type 15");
    }
}

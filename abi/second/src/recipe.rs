//! How a dispatch sends rows: unchanged, with scales, or cast.
#![allow(unsafe_code)]

use crate::objects::Group;
use crate::read::{self, NO_SCALES, known};
use crate::tensor::{self, absent};
use crate::types::{ncclEpDispatchInputs_t, ncclEpDispatchOutputs_t, ncclEpTensor_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::group::Algorithm;
use nccl_ep_core::model::tensor::{DType, Tensor};
use std::ffi::c_uint;

const NAME: &str = "config.quant_recipe";
/// Rows, and a row's scales, begin at and are multiples of this many bytes.
const ALIGN: usize = 16;
/// Rows that are cast are multiples of this many elements.
const CAST_ELEMENTS: u32 = 512;
/// Elements per scale of a cast.
const CAST_BLOCK: u32 = 128;
/// NCCL's number for two float4 in a byte.
const FLOAT4X2: c_uint = 12;

/// A recipe of a dispatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipe {
    /// Rows unchanged.
    None,
    /// Rows with scales that the caller passes.
    Forward,
    /// Cast to float8e4m3 with float32 scales.
    Cast,
}

/// The scales of a dispatch.
#[derive(Clone, Copy, Default)]
pub struct Scales {
    /// Input scales.
    pub given: Option<Tensor>,
    /// Output scales.
    pub out: Option<Tensor>,
    /// `round_scales` of a cast.
    pub round: c_uint,
}

impl Recipe {
    /// The recipe with this number.
    pub fn of(number: u32, algorithm: Algorithm) -> Result<Self> {
        match (number, algorithm) {
            (0, _) => Ok(Self::None),
            (1, _) => Ok(Self::Forward),
            (2, Algorithm::LowLatency) => Ok(Self::Cast),
            (2, Algorithm::HighThroughput) => {
                let rule = "must be a recipe of high throughput";
                let error = refuse::argument(NAME, rule);
                Err(error.got("NCCL_EP_DISP_QUANT_DS_FP8E3M4", "another one"))
            }
            (other, _) => known(NAME, other, 2).map(|()| Self::None),
        }
    }

    /// Reads the scales that the recipe requires, and checks rows as it demands; the core checks extents.
    ///
    /// # Safety
    /// As of `ncclEpDispatch`.
    pub unsafe fn scales(
        self,
        group: &Group,
        (inputs, outputs): (&ncclEpDispatchInputs_t, &ncclEpDispatchOutputs_t),
        round: c_uint,
    ) -> Result<Scales> {
        // SAFETY: this function's contract.
        unsafe {
            match self {
                Self::None => {
                    absent("inputs.scales", inputs.scales, NO_SCALES)?;
                    absent("outputs.scales", outputs.scales, NO_SCALES)?;
                    Ok(Scales::default())
                }
                Self::Forward => forward(group, inputs, outputs, round),
                Self::Cast => cast(group, inputs, outputs, round),
            }
        }
    }
}

/// # Safety
/// As of [`Recipe::scales`].
unsafe fn forward(
    group: &Group,
    inputs: &ncclEpDispatchInputs_t,
    outputs: &ncclEpDispatchOutputs_t,
    round: c_uint,
) -> Result<Scales> {
    if round != 0 {
        let error = refuse::argument("config.round_scales", "must be 0, as scales are forwarded");
        return Err(error.got(round, 0));
    }
    // SAFETY: this function's contract.
    let (given, out) = unsafe {
        if group.session.facts().algorithm == Algorithm::HighThroughput {
            same_memory(outputs)?;
        }
        let (_, from) = forwarded(group, "inputs.tokens", inputs.tokens, false)?;
        let (_, to) = forwarded(group, "outputs.tokens", outputs.tokens, false)?;
        let (given, _) = forwarded(group, "inputs.scales", inputs.scales, true)?;
        let (out, _) = forwarded(group, "outputs.scales", outputs.scales, true)?;
        // The core does not tell float4x2 from uint8.
        if from != to {
            let error = refuse::argument("outputs.tokens.datatype", "must be the type of inputs.tokens");
            return Err(error.got(type_name(to), type_name(from)));
        }
        (given, out)
    };
    Ok(Scales { given: Some(given), out: Some(out), round })
}

/// Refuses rows in a window with scales outside, or vice versa. A tensor with an address is outside.
///
/// # Safety
/// As of [`Recipe::scales`].
unsafe fn same_memory(outputs: &ncclEpDispatchOutputs_t) -> Result<()> {
    // SAFETY: this function's contract.
    let (rows, scales) = unsafe {
        (read::required("outputs.tokens", outputs.tokens)?, read::required("outputs.scales", outputs.scales)?)
    };
    let is_windowed = |it: &ncclEpTensor_t| it.data.is_null() && !it.win_hdl.is_null();
    if is_windowed(&rows) == is_windowed(&scales) {
        return Ok(());
    }
    Err(refuse::argument("outputs.scales.win_hdl", "must be a window with outputs.tokens, or not with it"))
}

/// NCCL's element type `number` in a text.
fn type_name(number: c_uint) -> String {
    match DType::from_raw(number) {
        _ if number == FLOAT4X2 => "float4x2".to_owned(),
        Some(dtype) => dtype.to_string(),
        None => number.to_string(),
    }
}

/// Rows or scales that travel unchanged: a tensor `[.., columns]` of numbers, and NCCL's number of their type.
///
/// # Safety
/// As of [`Recipe::scales`].
unsafe fn forwarded(
    group: &Group,
    name: &'static str,
    raw: *const ncclEpTensor_t,
    is_scales: bool,
) -> Result<(Tensor, c_uint)> {
    // SAFETY: this function's contract.
    let (tensor, raw) = unsafe { (tensor::required(group, name, raw)?, read::required(name, raw)?) };
    let is_fp4 = raw.datatype == FLOAT4X2;
    let fits = match tensor.dtype {
        Some(DType::Uint8) => is_scales != is_fp4,
        Some(DType::Float32 | DType::Float16 | DType::Bfloat16 | DType::Float8E4M3 | DType::Float8E5M2) => true,
        _ => false,
    };
    if !fits {
        let rule = "must be a float type of 1, 2 or 4 bytes; rows also float4x2, scales uint8";
        return Err(refuse::argument(format_args!("{name}.datatype"), rule).got(type_name(raw.datatype), "one of them"));
    }
    let size = tensor.dtype.map_or(0, DType::size);
    let columns = tensor.sizes().last().map_or(0, |&columns| columns as usize);
    let (bytes, data) = (columns * size, tensor.data.0);
    if bytes == 0 || !bytes.is_multiple_of(ALIGN) {
        let rule = "must be rows of a positive multiple of 16 bytes";
        return Err(refuse::argument(name, rule).got(format_args!("{bytes} bytes"), "a multiple of 16"));
    }
    if !data.is_multiple_of(ALIGN) {
        let error = refuse::argument(format_args!("{name}.data"), "must be a multiple of 16");
        return Err(error.got(format_args!("{data:#x}"), "a multiple of 16"));
    }
    Ok((tensor, raw.datatype))
}

/// # Safety
/// As of [`Recipe::scales`].
unsafe fn cast(
    group: &Group,
    inputs: &ncclEpDispatchInputs_t,
    outputs: &ncclEpDispatchOutputs_t,
    round: c_uint,
) -> Result<Scales> {
    absent("inputs.scales", inputs.scales, "must be NULL, as the recipe makes them")?;
    // SAFETY: this function's contract.
    let (tokens, out_tokens, out) = unsafe {
        (
            tensor::required(group, "inputs.tokens", inputs.tokens)?,
            tensor::required(group, "outputs.tokens", outputs.tokens)?,
            tensor::required(group, "outputs.scales", outputs.scales)?,
        )
    };
    let types = [
        ("inputs.tokens.datatype", tokens.dtype, DType::Bfloat16),
        ("outputs.tokens.datatype", out_tokens.dtype, DType::Float8E4M3),
        ("outputs.scales.datatype", out.dtype, DType::Float32),
    ];
    for (name, got, expected) in types {
        if got != Some(expected) {
            let rule = format_args!("must be {expected} in this recipe");
            return Err(refuse::argument(name, rule));
        }
    }
    let hidden = tokens.sizes().get(1).copied().unwrap_or(0);
    if hidden == 0 || !hidden.is_multiple_of(CAST_ELEMENTS) {
        let rule = "must be a positive multiple of 512";
        return Err(refuse::argument("inputs.tokens.sizes[1]", rule).got(hidden, "such a number"));
    }
    let blocks = hidden / CAST_BLOCK;
    if out.sizes().last() != Some(&blocks) {
        let rule = "must be a scale for each 128 elements in its last dimension";
        return Err(refuse::argument("outputs.scales.sizes", rule).got(format_args!("{:?}", out.sizes()), blocks));
    }
    Ok(Scales { given: None, out: Some(out), round })
}

//! Converts a caller's structs to owned structs of this generation; and reads numbers that several calls have.
//!
//! The only place that dereferences pointers to structs. Each begins with its size and a magic number. A shorter one is
//! of an earlier generation: missing fields count as zero. The rest of a longer one is not read.
#![allow(unsafe_code)]

use crate::types::{
    ncclEpCombineConfig_t, ncclEpCombineInputs_t, ncclEpCombineOutputs_t, ncclEpCompleteConfig_t,
    ncclEpDispatchConfig_t, ncclEpDispatchInputs_t, ncclEpDispatchOutputs_t, ncclEpGroupConfig_t, ncclEpHandleConfig_t,
    ncclEpLayoutInfo_t, ncclEpTensor, ncclEpTensorAllocConfig_t,
};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::group::Algorithm;
use std::mem::{MaybeUninit, offset_of};

/// The magic number of all structs except tensors; also in the header.
pub const MAGIC: u32 = 0xC00F_FFEE;
/// The magic number of tensors that a program fills in.
const TENSOR_MAGIC: u32 = 0xCAFE_CAFE;
/// The magic number of tensors from `ncclEpTensorAlloc`.
pub const OWN_TENSOR_MAGIC: u32 = 0xCAFE_A110;

/// A struct that begins with its size and a magic number.
///
/// # Safety
/// It is plain data, for which zeros are a valid value.
pub unsafe trait Prefixed: Copy {
    /// Size in the first generation that has it.
    const FIRST_SIZE: usize;
    /// Its magic numbers.
    const MAGIC: &[u32] = &[MAGIC];
}

macro_rules! prefixed {
    ($($name:ident: $first:expr;)*) => {
        $(
            // SAFETY: numbers, enums that may be any number, and addresses.
            unsafe impl Prefixed for $name {
                const FIRST_SIZE: usize = $first;
            }
        )*
    };
}

prefixed! {
    ncclEpGroupConfig_t: offset_of!(ncclEpGroupConfig_t, zero_copy);
    ncclEpLayoutInfo_t: offset_of!(ncclEpLayoutInfo_t, recv_topk_idx_kind);
    ncclEpDispatchInputs_t: size_of::<Self>();
    ncclEpDispatchOutputs_t: size_of::<Self>();
    ncclEpCombineInputs_t: offset_of!(ncclEpCombineInputs_t, scales);
    ncclEpCombineOutputs_t: size_of::<Self>();
    ncclEpHandleConfig_t: size_of::<Self>();
    ncclEpDispatchConfig_t: offset_of!(ncclEpDispatchConfig_t, quant_recipe);
    ncclEpCombineConfig_t: offset_of!(ncclEpCombineConfig_t, quant_recipe);
    ncclEpCompleteConfig_t: size_of::<Self>();
    ncclEpTensorAllocConfig_t: size_of::<Self>();
}

// SAFETY: numbers and addresses.
unsafe impl Prefixed for ncclEpTensor {
    const FIRST_SIZE: usize = size_of::<Self>();
    const MAGIC: &[u32] = &[TENSOR_MAGIC, OWN_TENSOR_MAGIC];
}

/// Copies the struct `name`; `None` if the caller passed NULL.
///
/// # Safety
/// `raw` is NULL or points to eight bytes; if these are a size and the magic number, to that many bytes.
pub unsafe fn optional<T: Prefixed>(name: &str, raw: *const T) -> Result<Option<T>> {
    if raw.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, so by contract there are eight bytes.
    let [size, magic] = unsafe { raw.cast::<[u32; 2]>().read_unaligned() };
    if !T::MAGIC.contains(&magic) {
        let error = refuse::argument(format_args!("{name}.magic"), "must be that of its struct");
        let expected = T::MAGIC.first().copied().unwrap_or_default();
        return Err(error.got(format_args!("{magic:#x}"), format_args!("{expected:#x}")));
    }
    let size = size as usize;
    if size < T::FIRST_SIZE {
        let error = refuse::argument(format_args!("{name}.size"), "must be the size of its struct");
        return Err(error.got(size, format_args!("{} or more", T::FIRST_SIZE)));
    }
    let mut copy = MaybeUninit::<T>::zeroed();
    let bytes = size.min(size_of::<T>());
    // SAFETY: there are `size` bytes by contract, and zeros behind them are a value of every field.
    let copy = unsafe {
        let from = raw.cast::<MaybeUninit<u8>>();
        std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr().cast(), bytes);
        copy.assume_init()
    };
    Ok(Some(copy))
}

/// The same for a struct that the call requires.
///
/// # Safety
/// As of [`optional`].
pub unsafe fn required<T: Prefixed>(name: &str, raw: *const T) -> Result<T> {
    // SAFETY: this function's contract.
    let read = unsafe { optional(name, raw) }?;
    read.ok_or_else(|| refuse::argument(name, "must not be NULL"))
}

/// The rule for scales of rows that travel unchanged.
pub const NO_SCALES: &str = "must be NULL, as the recipe has no scales";

/// Refuses a number that is no enumerator.
pub fn known(name: &str, number: u32, last: u32) -> Result<()> {
    if number <= last {
        return Ok(());
    }
    let error = refuse::argument(name, "must be a value of its enum");
    Err(error.got(number, format_args!("0 to {last}")))
}

/// Whether an operation is in the backward pass, which LL lacks.
pub fn is_backward(algorithm: Algorithm, direction: Option<u32>) -> Result<bool> {
    let name = "config.pass_direction";
    let direction = direction.unwrap_or(0);
    known(name, direction, 1)?;
    match (direction, algorithm) {
        (0, _) => Ok(false),
        (_, Algorithm::HighThroughput) => Ok(true),
        (_, Algorithm::LowLatency) => {
            let text = "config.pass_direction: must be NCCL_EP_FWD_PASS in low latency";
            Err(Error::new(Code::InvalidUsage, text))
        }
    }
}

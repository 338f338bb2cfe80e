//! Tensor descriptors: creating the library's own, and reading any.
#![allow(unsafe_code)]

use crate::objects::{GUARD, Group, check_out, write_out};
use crate::read::{self, OWN_TENSOR_MAGIC};
use crate::types::{ncclDataType_t, ncclEpTensor, ncclEpTensor_t, ncclEpTensorAllocConfig_t, ncclResult_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::tensor::{DType, DevPtr, MAX_DIMS, Tensor};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::fmt::Display;

/// The last of NCCL's element types: two float4e2m1 in a byte, which the core does not know.
const LAST_DATATYPE: u32 = 12;

/// The live descriptors of `ncclEpTensorAlloc`, by address, with the addresses of their extents. Both are raw, since
/// the caller writes to them.
static OWN: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

type Sizes = [usize; MAX_DIMS];

/// Makes a descriptor without memory: set `data` yourself. Local. The extents are copied.
///
/// @param tensor    gets the descriptor; written on success only
/// @param ndim      1 to 5
/// @param datatype  element type
/// @param sizes     `ndim` extents, slowest first
/// @param config    may be NULL
///
/// Returns `ncclInvalidArgument` for a NULL pointer, a bad `ndim` or an unknown `datatype`.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpTensorAlloc(
    tensor: *mut *mut ncclEpTensor_t,
    ndim: c_uint,
    datatype: ncclDataType_t,
    sizes: *const usize,
    config: *const ncclEpTensorAllocConfig_t,
) -> ncclResult_t {
    GUARD.run("ncclEpTensorAlloc", || {
        // SAFETY: this function's contract.
        unsafe { read::optional("config", config) }?;
        check_out("tensor", tensor)?;
        // SAFETY: as above.
        let given = unsafe { extents("tensor", ndim, sizes) }?;
        if datatype > LAST_DATATYPE {
            let error = refuse::argument("datatype", "must be an NCCL element type");
            return Err(error.got(datatype, format_args!("0 to {LAST_DATATYPE}")));
        }
        let mut kept: Sizes = [0; MAX_DIMS];
        for (to, from) in kept.iter_mut().zip(given) {
            *to = *from;
        }
        let sizes = Box::into_raw(Box::new(kept));
        let made = Box::into_raw(Box::new(ncclEpTensor {
            size: size_of::<ncclEpTensor>() as c_uint,
            magic: OWN_TENSOR_MAGIC,
            ndim,
            datatype,
            data: std::ptr::null_mut(),
            win_hdl: std::ptr::null_mut(),
            win_offset: 0,
            sizes: sizes.cast(),
        }));
        OWN.lock().insert(made as usize, sizes as usize);
        // SAFETY: this function's contract.
        unsafe { write_out("tensor", tensor, made) }
    })
}

/// Destroys a descriptor of `ncclEpTensorAlloc`, not the memory that it refers to. Local. NULL is a successful no-op.
///
/// Returns `ncclInvalidArgument` for any other descriptor, or one that was destroyed already.
///
/// # Safety
/// Nobody uses the descriptor any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpTensorDestroy(tensor: *mut ncclEpTensor_t) -> ncclResult_t {
    GUARD.destroy("ncclEpTensorDestroy", || {
        if tensor.is_null() {
            return Ok(());
        }
        let Some(sizes) = OWN.lock().remove(&(tensor as usize)) else {
            return Err(refuse::argument("tensor", "must be a tensor of ncclEpTensorAlloc"));
        };
        // SAFETY: both came from boxes, and were known until now.
        unsafe {
            drop(Box::from_raw(tensor));
            drop(Box::from_raw(sizes as *mut Sizes));
        }
        Ok(())
    })
}

/// Copies the tensor `name`; `None` if the caller passed NULL. A tensor without data is in a window of the group's
/// communicator.
///
/// # Safety
/// `raw` is NULL or points to a descriptor whose `sizes` are NULL or `ndim` numbers.
pub unsafe fn optional(group: &Group, name: &'static str, raw: *const ncclEpTensor_t) -> Result<Option<Tensor>> {
    // SAFETY: this function's contract.
    let Some(raw) = unsafe { read::optional(name, raw) }? else {
        return Ok(None);
    };
    // SAFETY: as above.
    let given = unsafe { extents(name, raw.ndim, raw.sizes) }?;
    let data = address(group, name, &raw, given)?;
    let mut sizes = [0_u32; MAX_DIMS];
    for (to, from) in sizes.iter_mut().zip(given) {
        *to = u32::try_from(*from).map_err(|_| {
            let error = refuse::argument(format_args!("{name}.sizes"), "must be numbers of 32 bits");
            error.got(format_args!("{given:?}"), "less than 2^32 each")
        })?;
    }
    let sizes = sizes.get(..given.len()).unwrap_or_default();
    let dtype = match raw.datatype {
        // The core moves bytes of any type.
        LAST_DATATYPE => Some(DType::Uint8),
        other => DType::from_raw(other),
    };
    Ok(Some(Tensor::new(data, dtype, sizes)))
}

/// Where a tensor with the extents `given` begins.
fn address(group: &Group, name: &str, raw: &ncclEpTensor, given: &[usize]) -> Result<DevPtr> {
    let is_empty = given.contains(&0);
    let mut data = raw.data as usize;
    if data == 0 && !is_empty && !raw.win_hdl.is_null() {
        let begin = group.comm.window_data(raw.win_hdl as usize);
        let begin = begin.map_err(|error| error.within(format_args!("{name}.win_hdl")))?;
        data = begin.0.wrapping_add(raw.win_offset as usize);
    }
    if data == 0 && !is_empty {
        let rule = "must not be NULL unless the tensor is empty";
        return Err(refuse::argument(format_args!("{name}.data"), rule));
    }
    Ok(DevPtr(data))
}

/// The address and the length of memory that the tensor `name` is, `uint8 [n]` of any length.
///
/// # Safety
/// As of [`optional`].
pub unsafe fn memory(group: &Group, name: &str, raw: *const ncclEpTensor_t) -> Result<Option<(DevPtr, usize)>> {
    // SAFETY: this function's contract.
    let Some(raw) = unsafe { read::optional(name, raw) }? else {
        return Ok(None);
    };
    // SAFETY: as above.
    let given = unsafe { extents(name, raw.ndim, raw.sizes) }?;
    let (&[bytes], Some(DType::Uint8)) = (given, DType::from_raw(raw.datatype)) else {
        return Err(refuse::argument(name, "must be uint8 with one dimension"));
    };
    Ok(Some((address(group, name, &raw, given)?, bytes)))
}

/// The same for a tensor that the call requires.
///
/// # Safety
/// As of [`optional`].
pub unsafe fn required(group: &Group, name: &'static str, raw: *const ncclEpTensor_t) -> Result<Tensor> {
    // SAFETY: this function's contract.
    let read = unsafe { optional(group, name, raw) }?;
    read.ok_or_else(|| refuse::argument(name, "is required"))
}

/// # Safety
/// `sizes` are NULL or `ndim` numbers.
unsafe fn extents<'a>(name: impl Display, ndim: c_uint, sizes: *const usize) -> Result<&'a [usize]> {
    let dims = ndim as usize;
    if dims == 0 || dims > MAX_DIMS {
        let error = refuse::argument(format_args!("{name}.ndim"), "must be a supported number of dimensions");
        return Err(error.got(dims, format_args!("1 to {MAX_DIMS}")));
    }
    if sizes.is_null() {
        return Err(refuse::argument(format_args!("{name}.sizes"), "must not be NULL"));
    }
    // SAFETY: not NULL, and the caller vouches for `ndim` numbers.
    Ok(unsafe { std::slice::from_raw_parts(sizes, dims) })
}

/// Refuses the tensor `name`, which the operation does not have.
pub fn absent(name: &str, tensor: *const ncclEpTensor_t, rule: &str) -> Result<()> {
    if tensor.is_null() { Ok(()) } else { Err(refuse::argument(name, rule)) }
}

/// The first `parts` entries of the tensor `name` along its first dimension, which has at least as many; `what` says of
/// what they are.
pub fn leading(name: &str, tensor: &Tensor, (parts, what): (usize, &str)) -> Result<Tensor> {
    if rows(tensor) >= parts {
        return Ok(first(tensor, parts));
    }
    let rule = format_args!("must be at least the number of {what}");
    let error = refuse::argument(format_args!("{name}.sizes[0]"), rule);
    Err(error.got(rows(tensor), format_args!("{parts} or more")))
}

/// The first `most` entries of a tensor along its first dimension.
pub fn first(tensor: &Tensor, most: usize) -> Tensor {
    let mut sizes = [0; MAX_DIMS];
    let given = tensor.sizes();
    for (to, from) in sizes.iter_mut().zip(given) {
        *to = *from;
    }
    let [rows, ..] = &mut sizes;
    *rows = (*rows).min(u32::try_from(most).unwrap_or(u32::MAX));
    Tensor::new(tensor.data, tensor.dtype, sizes.get(..given.len()).unwrap_or_default())
}

/// The rows of a tensor.
pub fn rows(tensor: &Tensor) -> usize {
    tensor.sizes().first().map_or(0, |&rows| rows as usize)
}

//! Creation and destruction of tensors.
#![allow(unsafe_code)]

use crate::objects::{GUARD, Group, check_out, on_group, write_out};
use crate::owners;
use crate::types::{ncclDataType_t, ncclEpGroup_t, ncclEpTensorFlags_t, ncclNDTensor_t, ncclResult_t, raw};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::tensor::{DType, DevPtr, MAX_DIMS};
use std::ffi::{c_uint, c_void};

/// Allocates a dense tensor in device memory and fills in its descriptor. Local. The data is not initialised. While a
/// stream is being captured this works as usual, outside of the graph, and `alloc_fn` may call `cudaMalloc`; the same
/// holds for `ncclEpTensorDestroy` and `free_fn`.
///
/// @param ep_group  group whose `alloc_fn` allocates the data
/// @param tensor    gets the descriptor; written on success only
/// @param ndim      1 to 5
/// @param datatype  element type
/// @param tag       role of the tensor; may be changed in the descriptor later
/// @param size0     extent of the slowest dimension; `size1` to `size4` follow, those beyond `ndim` are ignored
///
/// Returns `ncclInvalidArgument` for a NULL or dead group, a NULL `tensor`, a bad `ndim`, an unknown `datatype` or a
/// size beyond the address space; `ncclSystemError` if `alloc_fn` fails; `ncclUnhandledCudaError` if the device has no
/// memory left.
///
/// # Safety
/// `tensor` is NULL or points to a writable descriptor.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The ABI's.
pub unsafe extern "C" fn ncclEpTensorCreate(
    ep_group: ncclEpGroup_t,
    tensor: *mut ncclNDTensor_t,
    ndim: c_uint,
    datatype: ncclDataType_t,
    tag: raw::ncclEpTensorTag_t,
    size0: c_uint,
    size1: c_uint,
    size2: c_uint,
    size3: c_uint,
    size4: c_uint,
) -> ncclResult_t {
    on_group("ncclEpTensorCreate", ep_group, |group| {
        check_out("tensor", tensor)?;
        let all = [size0, size1, size2, size3, size4];
        let sizes = all.get(..ndim as usize).filter(|sizes| !sizes.is_empty()).ok_or_else(|| {
            refuse::argument("ndim", "must be a supported number of dimensions")
                .got(ndim, format_args!("1 to {MAX_DIMS}"))
        })?;
        let bytes = byte_count(datatype, sizes)?;
        let arrays = Arrays::new(sizes)?;
        let data = owners::alloc(&group.allocator, bytes)?;
        let (sizes, strides) = arrays.into_raw();
        let made = ncclNDTensor_t {
            version: 1,
            ndim,
            sizes,
            strides,
            datatype,
            data: data.0 as *mut c_void,
            tag,
            flags: ncclEpTensorFlags_t::NCCL_EP_TENSOR_FLAG_NONE as c_uint,
        };
        // SAFETY: this function's contract.
        unsafe { write_out("tensor", tensor, made) }
    })
}

/// Frees a descriptor's data and arrays and sets their pointers to NULL, so that a second call is harmless. Local. NULL
/// is a successful no-op.
///
/// The arrays are released with `free()`. Data that `ncclEpTensorCreate` made is freed by the counterpart of its
/// allocator, even after the group was destroyed. Views of low-latency rows and memory of `ncclEpMemAlloc` are kept, as
/// they end with the group or by `ncclEpMemFree`. Other data is freed by the `free_fn` of `ep_group`, or kept if
/// `ep_group` is NULL.
///
/// Where no `free_fn` was given, data is freed by `cudaFree`, which waits for the device. So the data stays allocated
/// until a later call while an exchange or operation of this library runs or is stuck there, or a graph holds one (on
/// one node: while a group with captured operations is alive). If more than 256 allocations wait, or 256 MiB only for
/// graphs, the oldest are freed without waiting, unless something is stuck. Your work on them must have ended.
///
/// @param ep_group  the tensor's group, alive or destroyed, or NULL
/// @param tensor    the descriptor
///
/// Returns `ncclSystemError` or `ncclUnhandledCudaError` if freeing the data fails.
///
/// # Safety
/// `tensor` is NULL or points to a descriptor whose arrays are NULL or came from `malloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpTensorDestroy(ep_group: ncclEpGroup_t, tensor: *mut ncclNDTensor_t) -> ncclResult_t {
    GUARD.destroy("ncclEpTensorDestroy", || {
        // SAFETY: this function's contract.
        let Some(tensor) = (unsafe { tensor.as_mut() }) else { return Ok(()) };
        let data = DevPtr(std::mem::replace(&mut tensor.data, std::ptr::null_mut()) as usize);
        for array in [&mut tensor.sizes, &mut tensor.strides] {
            let array = std::mem::replace(array, std::ptr::null_mut());
            // SAFETY: this function's contract; each array is released once, as it is NULL now.
            unsafe { libc::free(array.cast()) };
        }
        let group = ep_group as usize;
        let allocator = if Group::owns(group, data) { None } else { Group::allocator_of(group) };
        owners::free(data, allocator.as_ref())
    })
}

fn byte_count(datatype: ncclDataType_t, sizes: &[c_uint]) -> Result<usize> {
    let dtype = DType::from_raw(datatype)
        .ok_or_else(|| refuse::argument("datatype", "must be an NCCL element type").got(datatype, "0 to 11"))?;
    // No allocation exceeds isize.
    let bytes = sizes
        .iter()
        .try_fold(dtype.size(), |bytes, &size| bytes.checked_mul(size as usize))
        .filter(|&bytes| isize::try_from(bytes).is_ok());
    bytes.ok_or_else(|| {
        refuse::argument("size0 to size4", "must describe fewer bytes than the address space has")
            .got(format_args!("{sizes:?}"), "less than 2^63 bytes")
    })
}

/// The two arrays of a descriptor, from `malloc`, so that programs may free them themselves.
struct Arrays {
    sizes: *mut c_uint,
    strides: *mut c_uint,
}

impl Arrays {
    fn new(sizes: &[c_uint]) -> Result<Self> {
        let bytes = size_of_val(sizes);
        // SAFETY: malloc takes any size.
        let (to, strides) = unsafe { (libc::malloc(bytes), libc::malloc(bytes)) };
        let arrays = Self { sizes: to.cast(), strides: strides.cast() };
        if arrays.sizes.is_null() || arrays.strides.is_null() {
            return Err(Error::new(Code::SystemError, "malloc: no memory for a tensor descriptor"));
        }
        for (index, size) in sizes.iter().enumerate() {
            // SAFETY: both arrays have as many elements as `sizes`, and nobody else knows them.
            unsafe {
                arrays.sizes.add(index).write(*size);
                arrays.strides.add(index).write(1);
            }
        }
        Ok(arrays)
    }

    fn into_raw(self) -> (*mut c_uint, *mut c_uint) {
        let kept = std::mem::ManuallyDrop::new(self);
        (kept.sizes, kept.strides)
    }
}

impl Drop for Arrays {
    fn drop(&mut self) {
        // SAFETY: both came from malloc, or are NULL, and are released only here.
        unsafe {
            libc::free(self.sizes.cast());
            libc::free(self.strides.cast());
        }
    }
}

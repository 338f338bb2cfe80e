//! A caller's descriptors -> tensors by tag, owned plain data.
//!
//! The only place that dereferences pointers to descriptors. Each function copies what it needs and
//! refuses NULL; the core checks what the values mean.
#![allow(unsafe_code)]

use crate::types::ncclNDTensor_t;
use nccl_ep_abi::refuse;
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::model::tensor::{DType, DevPtr, MAX_DIMS, Strides, Tensor};
use std::ffi::{c_uint, c_void};
use std::fmt::Display;

/// Far more tensors than a call has use for: a larger count is a mistake, and what it counts need not be there.
const MOST_TENSORS: usize = 16;

nccl_ep_core::named! {
    /// The meaning of a tensor in a call, as `nccl_ep.h` describes each; all tags that operations use.
    #[allow(missing_docs)]
    Tag:
    Tokens = 1, "TOKENS";
    TopkIdx = 2, "TOPK_IDX";
    TopkWeights = 3, "TOPK_WEIGHTS";
    Scales = 4, "SCALES";
    RecvExpertCounterDevice = 5, "RECV_EXPERT_COUNTER_DEVICE";
    RecvExpertCounterHost = 6, "RECV_EXPERT_COUNTER_HOST";
}

/// The tensors of one argument list, at most one per tag.
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorSet {
    by_tag: [Option<Tensor>; Tag::ALL.len()],
    /// The strides of the scales, unless they are dense.
    pub scale_strides: Option<Strides>,
}

impl TensorSet {
    pub fn get(&self, tag: Tag) -> Option<&Tensor> {
        self.by_tag.get(tag as usize - 1).and_then(Option::as_ref)
    }

    /// Adds `tensor`, which is the one with this tag from now on.
    pub fn add(&mut self, tag: Tag, tensor: Tensor) {
        if let Some(place) = self.by_tag.get_mut(tag as usize - 1) {
            *place = Some(tensor);
        }
    }
}

/// Copies the tensors of the list `name` into `set`, by tag, each of which may be there once. In place, as a set is
/// large to move.
///
/// # Safety
/// If `count` is not 0, `list` is NULL or points to `count` pointers, each NULL or pointing to a
/// descriptor as [`tensor`] wants it.
pub unsafe fn tensor_set(
    set: &mut TensorSet,
    name: &'static str,
    list: *const *const ncclNDTensor_t,
    count: c_uint,
) -> Result<()> {
    if count == 0 {
        return Ok(()); // the pointer may be garbage in this case
    }
    if list.is_null() {
        return Err(refuse::argument(name, "must not be NULL when its count is not 0"));
    }
    if count as usize > MOST_TENSORS {
        return Err(too_many(name, count));
    }
    for index in 0..count as usize {
        // SAFETY: `index` is below the count that the caller vouches for.
        let descriptor = unsafe { list.add(index).read() };
        if descriptor.is_null() {
            return Err(refuse::argument(Item(name, index), "must not be NULL"));
        }
        // SAFETY: not NULL, so by contract it points to a descriptor.
        let raw = unsafe { descriptor.read() };
        if let Some(tag) = Tag::from_raw(raw.tag) {
            if set.get(tag).is_some() {
                return Err(again(Item(name, index), tag));
            }
            // SAFETY: the caller vouches for the arrays of each descriptor.
            unsafe {
                if tag == Tag::Scales {
                    add_scales(set, name, &raw)?;
                } else {
                    set.add(tag, copy(Item(name, tag), &raw)?);
                }
            }
        }
    }
    Ok(())
}

/// Stores the address `data` in the descriptor of a list that [`tensor_set`] has read which is tagged `tag`.
///
/// # Safety
/// As of that; the descriptors may be written.
pub unsafe fn set_data((list, count): (*const *mut ncclNDTensor_t, c_uint), tag: Tag, data: DevPtr) {
    for index in 0..count as usize {
        // SAFETY: this function's contract; none of them is NULL, as that was refused.
        let descriptor = unsafe { &mut *list.add(index).read() };
        if descriptor.tag == tag as u32 {
            descriptor.data = data.0 as *mut c_void;
        }
    }
}

/// Copies one descriptor and its tag.
///
/// # Safety
/// `descriptor` is NULL or points to a descriptor whose `sizes` and `strides` are NULL or point to
/// `ndim` numbers.
pub unsafe fn tensor(name: &str, descriptor: *const ncclNDTensor_t) -> Result<(u32, Tensor)> {
    if descriptor.is_null() {
        return Err(refuse::argument(name, "must not be NULL"));
    }
    // SAFETY: not NULL, so by contract it points to a descriptor.
    let raw = unsafe { descriptor.read() };
    // SAFETY: the caller vouches for its arrays.
    Ok((raw.tag, unsafe { copy(name, &raw) }?))
}

/// Scales may have a pitch, which the core checks.
///
/// # Safety
/// As of [`copy`].
#[inline(never)] // Apart from the tensors that every call has.
unsafe fn add_scales(set: &mut TensorSet, name: &'static str, raw: &ncclNDTensor_t) -> Result<()> {
    let dense = ncclNDTensor_t { strides: std::ptr::null_mut(), ..*raw };
    // SAFETY: this function's contract.
    let tensor = unsafe { copy(Item(name, Tag::Scales), &dense) }?;
    set.add(Tag::Scales, tensor);
    if !raw.strides.is_null() {
        // SAFETY: not NULL, and the caller vouches for `ndim` numbers, which `copy` has bounded.
        let strides = unsafe { std::slice::from_raw_parts(raw.strides, raw.ndim as usize) };
        if !is_dense(tensor.sizes(), strides) {
            set.scale_strides = Some(Strides::new(strides));
        }
    }
    Ok(())
}

#[cold]
fn too_many(name: &str, count: c_uint) -> Error {
    refuse::argument(format_args!("num_{name}"), "is more than any call takes")
        .got(count, format_args!("at most {MOST_TENSORS}"))
}

#[cold]
fn again(item: Item<usize>, tag: Tag) -> Error {
    let rule = format_args!("{tag} is in the list already");
    refuse::argument(format_args!("{item}.tag"), rule)
}

#[cold]
fn not_dense(name: impl Display, strides: &[c_uint]) -> Error {
    refuse::argument(format_args!("{name}.strides"), "must say that the tensor is dense")
        .got(format_args!("{strides:?}"), "all ones, NULL, or row-major strides")
}

/// # Safety
/// `raw.sizes` and `raw.strides` are NULL or point to `raw.ndim` numbers.
#[inline(always)] // So a tensor is written where it stays.
unsafe fn copy(name: impl Display + Copy, raw: &ncclNDTensor_t) -> Result<Tensor> {
    let dims = raw.ndim as usize;
    if dims == 0 || dims > MAX_DIMS {
        return Err(refuse::argument(format_args!("{name}.ndim"), "must be a supported number of dimensions")
            .got(dims, format_args!("1 to {MAX_DIMS}")));
    }
    if raw.sizes.is_null() {
        return Err(refuse::argument(format_args!("{name}.sizes"), "must not be NULL"));
    }
    // SAFETY: not NULL, and the caller vouches for `ndim` numbers.
    let sizes = unsafe { std::slice::from_raw_parts(raw.sizes, dims) };
    if !raw.strides.is_null() {
        // SAFETY: as for the sizes.
        let strides = unsafe { std::slice::from_raw_parts(raw.strides, dims) };
        if !is_dense(sizes, strides) {
            return Err(not_dense(name, strides));
        }
    }
    Ok(Tensor::new(DevPtr(raw.data as usize), DType::from_raw(raw.datatype), sizes))
}

/// Whether `strides` means "dense": all ones, or row-major.
fn is_dense(sizes: &[c_uint], strides: &[c_uint]) -> bool {
    if strides.iter().all(|&stride| stride == 1) {
        return true;
    }
    let mut expected = 1_u64;
    sizes.iter().zip(strides).rev().all(|(&size, &stride)| {
        let matches = u64::from(stride) == expected || size <= 1;
        expected = expected.saturating_mul(u64::from(size));
        matches
    })
}

/// Prints as `inputs[2]` or `inputs[TOKENS]`.
#[derive(Clone, Copy)]
struct Item<T>(&'static str, T);

impl<T: Display> Display for Item<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}]", self.0, self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_is_all_ones_or_row_major() {
        assert!(is_dense(&[2, 3, 4], &[1, 1, 1]));
        assert!(is_dense(&[2, 3, 4], &[12, 4, 1]));
        assert!(is_dense(&[1, 4], &[99, 1]));
        assert!(!is_dense(&[2, 3, 4], &[24, 8, 2]));
        assert!(!is_dense(&[2, 4], &[8, 1]));
    }
}

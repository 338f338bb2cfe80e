//! Raw pointers of a call -> owned plain data.
//!
//! The only place that dereferences a caller's pointers. Each function copies what it needs and
//! refuses NULL; the core checks what the values mean.
#![allow(unsafe_code)]

use crate::refuse;
use crate::tags::{Tag, TensorSet};
use crate::types::{ncclEpAlgorithm_t, ncclEpGroupConfig_t, ncclNDTensor_t};
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::model::group::{Algorithm, GroupSettings};
use nccl_ep_core::model::tensor::{DType, DevPtr, MAX_DIMS, Strides, Tensor};
use std::ffi::c_uint;
use std::fmt::Display;

/// Far more tensors than a call has use for: a larger count is a mistake, and what it counts need not be there.
const MOST_TENSORS: usize = 16;
/// What later generations of NCCL EP have behind the size of each of their structures.
const LATER_MAGIC: u32 = 0xC00F_FFEE;

/// Refuses the configuration of a later generation, whose calls take other arguments: its program
/// has passed neither a stream nor an allocator.
///
/// # Safety
/// `config` is NULL or points to an `ncclEpGroupConfig_t`, or to a longer structure.
pub unsafe fn first_generation(config: *const ncclEpGroupConfig_t) -> Result<()> {
    // SAFETY: this function's contract; the second field has four bytes, whatever they mean.
    let second = unsafe { config.as_ref() }.map(|raw| unsafe { number_of(raw.algorithm) });
    match second == Some(LATER_MAGIC) {
        false => Ok(()),
        true => Err(refuse::argument(
            "config",
            "must be of this library's generation, but this program was built for NCCL EP 0.1.0 or newer",
        )),
    }
}

/// The number that a caller has written where an enumerator belongs.
///
/// # Safety
/// The caller has set its bytes.
unsafe fn number_of(enumerator: std::mem::MaybeUninit<ncclEpAlgorithm_t>) -> u32 {
    // SAFETY: the enum is 4 bytes that the caller has set, and u32 takes every bit pattern.
    unsafe { enumerator.as_ptr().cast::<u32>().read() }
}

/// Copies `*config`.
///
/// # Safety
/// `config` is NULL or points to an `ncclEpGroupConfig_t`.
pub unsafe fn group_config(config: *const ncclEpGroupConfig_t) -> Result<GroupSettings> {
    if config.is_null() {
        return Err(refuse::argument("config", "must not be NULL"));
    }
    // SAFETY: not NULL, so by contract it points to a configuration.
    let raw = unsafe { config.read() };
    let ncclEpGroupConfig_t {
        version,
        algorithm,
        num_experts,
        max_tokens_per_rank,
        token_size_bytes,
        rdma_buffer_size: _,
        num_qp_per_rank: _,
        num_channels,
    } = raw;
    // SAFETY: the caller has set all fields.
    let algorithm = unsafe { number_of(algorithm) };
    if version != 1 {
        return Err(refuse::argument("config.version", "must be 1").got(version, 1));
    }
    let given = |number: c_uint| (number > 0).then_some(number as usize);
    Ok(GroupSettings {
        algorithm: known_algorithm(algorithm)?,
        experts: num_experts as usize,
        max_tokens: given(max_tokens_per_rank),
        max_recv_rows: None,
        row_bytes: token_size_bytes as usize,
        channels: given(num_channels),
    })
}

fn known_algorithm(number: u32) -> Result<Algorithm> {
    match number {
        0 => Ok(Algorithm::LowLatency),
        1 => Ok(Algorithm::HighThroughput),
        other => Err(
            refuse::argument("config.algorithm", "must be a known algorithm")
                .got(other, "0 (low latency) or 1 (high throughput)"),
        ),
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
        return Err(refuse::argument(
            name,
            "must not be NULL when its count is not 0",
        ));
    }
    if count as usize > MOST_TENSORS {
        return Err(too_many(name, count));
    }
    for index in 0..count as usize {
        // SAFETY: `index` is below the count that the caller vouches for.
        let descriptor = unsafe { list.add(index).read() };
        if descriptor.is_null() {
            return Err(refuse::argument(ListItem(name, index), "must not be NULL"));
        }
        // SAFETY: not NULL, so by contract it points to a descriptor.
        let raw = unsafe { descriptor.read() };
        if let Some(tag) = Tag::from_raw(raw.tag) {
            if set.get(tag).is_some() {
                return Err(again(ListItem(name, index), tag));
            }
            // SAFETY: the caller vouches for the arrays of each descriptor.
            unsafe {
                if tag == Tag::Scales {
                    add_scales(set, name, &raw)?;
                } else {
                    set.add(tag, copy(ListTag(name, tag), &raw)?);
                }
            }
        }
    }
    Ok(())
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
    let dense = ncclNDTensor_t {
        strides: std::ptr::null_mut(),
        ..*raw
    };
    // SAFETY: this function's contract.
    let tensor = unsafe { copy(ListTag(name, Tag::Scales), &dense) }?;
    set.add(Tag::Scales, tensor);
    if !raw.strides.is_null() {
        // SAFETY: not NULL, and the caller vouches for `ndim` numbers, which `copy` has bounded.
        let strides = unsafe { std::slice::from_raw_parts(raw.strides, raw.ndim as usize) };
        if !is_dense(tensor.sizes(), strides) {
            set.set_scale_strides(Strides::new(strides));
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
fn again(item: ListItem, tag: Tag) -> Error {
    let rule = format_args!("{tag} is in the list already");
    refuse::argument(format_args!("{item}.tag"), rule)
}

#[cold]
fn not_dense(name: impl Display, strides: &[c_uint]) -> Error {
    refuse::argument(
        format_args!("{name}.strides"),
        "must say that the tensor is dense",
    )
    .got(
        format_args!("{strides:?}"),
        "all ones, NULL, or row-major strides",
    )
}

/// # Safety
/// `raw.sizes` and `raw.strides` are NULL or point to `raw.ndim` numbers.
#[inline]
unsafe fn copy(name: impl Display + Copy, raw: &ncclNDTensor_t) -> Result<Tensor> {
    let dims = raw.ndim as usize;
    if dims == 0 || dims > MAX_DIMS {
        return Err(refuse::argument(
            format_args!("{name}.ndim"),
            "must be a supported number of dimensions",
        )
        .got(dims, format_args!("1 to {MAX_DIMS}")));
    }
    if raw.sizes.is_null() {
        return Err(refuse::argument(
            format_args!("{name}.sizes"),
            "must not be NULL",
        ));
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
    Ok(Tensor::new(
        DevPtr(raw.data as usize),
        DType::from_raw(raw.datatype),
        sizes,
    ))
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

/// Prints as `inputs[2]`.
struct ListItem(&'static str, usize);

impl Display for ListItem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}]", self.0, self.1)
    }
}

/// Prints as `inputs[TOKENS]`.
#[derive(Clone, Copy)]
struct ListTag(&'static str, Tag);

impl Display for ListTag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}]", self.0, self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::is_dense;

    #[test]
    fn dense_is_all_ones_or_row_major() {
        assert!(is_dense(&[2, 3, 4], &[1, 1, 1]));
        assert!(is_dense(&[2, 3, 4], &[12, 4, 1]));
        assert!(is_dense(&[1, 4], &[99, 1]));
        assert!(!is_dense(&[2, 3, 4], &[24, 8, 2]));
        assert!(!is_dense(&[2, 4], &[8, 1]));
    }
}

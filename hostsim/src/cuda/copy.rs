//! Copies and fills, with CUDA's rules on when the call returns.
//!
//! The rules are kept as loose as CUDA documents them, since a program that relies on more breaks
//! on a GPU: device-to-device copies and fills are asynchronous even without `Async` in the name,
//! pinned memory is read and written when the stream gets there, pageable sources are staged.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::device;
use super::error::{CudaError, boundary, cudaError_t};
use super::heap::{self, Memory, Range};
use super::queue::{Stream, Ticket};
use super::recording;
use super::stream::{cudaStream_t, resolve};
use crate::report;

type CopyKind = c_int;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Device,
    Pinned,
    Pageable,
}

/// A checked copy.
#[derive(Clone, Copy)]
struct Copy {
    to: usize,
    from: usize,
    len: usize,
    to_side: Side,
    from_side: Side,
}

impl Copy {
    fn check(to: *mut c_void, from: *const c_void, len: usize, kind: CopyKind) -> Result<Self, CudaError> {
        // By the number of the kind: host to host, to device, from device, between devices, any.
        let (from_wanted, to_wanted) = match kind {
            0 => (Some(false), Some(false)),
            1 => (Some(false), Some(true)),
            2 => (Some(true), Some(false)),
            3 => (Some(true), Some(true)),
            4 => (None, None),
            _ => return Err(CudaError::InvalidMemcpyDirection),
        };
        let (to, from) = (to as usize, from as usize);
        let to_side = side("destination", to, len, to_wanted)?;
        Ok(Self { to, from, len, to_side, from_side: side("source", from, len, from_wanted)? })
    }

    fn job(self) -> impl Fn() -> Result<(), CudaError> {
        move || {
            // SAFETY: both ranges were live when the copy was submitted; freeing waits for the
            // device. `copy` allows overlap. A range that the caller unmapped meanwhile faults, as it would on a GPU.
            unsafe { std::ptr::copy(self.from as *const u8, self.to as *mut u8, self.len) };
            Ok(())
        }
    }

    /// The same copy, from a snapshot of the source.
    fn staged_job(self) -> impl Fn() -> Result<(), CudaError> {
        // SAFETY: the caller passes a source of `len` readable bytes.
        let image = unsafe { std::slice::from_raw_parts(self.from as *const u8, self.len) }.to_vec();
        move || {
            // SAFETY: as in `job`; the image is private and has `len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(image.as_ptr(), self.to as *mut u8, self.len) };
            Ok(())
        }
    }
}

/// Copies; returns when the copy is done, except between device allocations.
///
/// # Safety
/// Host ranges are valid for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemcpy(to: *mut c_void, from: *const c_void, len: usize, kind: CopyKind) -> cudaError_t {
    boundary(|| {
        if len == 0 {
            return Ok(());
        }
        let copy = Copy::check(to, from, len, kind)?;
        recording::refuse_unsafe_call()?;
        let stream = device::current()?.legacy()?;
        let ticket = recording::enqueue(&stream, copy.job())?;
        if (copy.to_side, copy.from_side) == (Side::Device, Side::Device) {
            return Ok(());
        }
        ticket.iter().for_each(Ticket::wait);
        stream.take_error()
    })
}

/// Copies in stream order.
///
/// # Safety
/// Host ranges are valid for `len` bytes, pinned ones until the stream has passed the copy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemcpyAsync(
    to: *mut c_void,
    from: *const c_void,
    len: usize,
    kind: CopyKind,
    stream: cudaStream_t,
) -> cudaError_t {
    boundary(|| {
        let stream = resolve(stream)?;
        if len == 0 {
            return Ok(());
        }
        let copy = Copy::check(to, from, len, kind)?;
        if copy.to_side == Side::Pageable || copy.from_side == Side::Pageable {
            recording::refuse(&stream, CudaError::StreamCaptureUnsupported)?;
        }
        if copy.to_side == Side::Pageable {
            device::submit(&stream, Vec::new(), Box::new(copy.job()))?.wait();
            return stream.take_error();
        }
        let enqueued = match copy.from_side {
            Side::Pageable => recording::enqueue(&stream, copy.staged_job()),
            _ => recording::enqueue(&stream, copy.job()),
        };
        enqueued.map(|_| ())
    })
}

/// Fills with a byte; asynchronous for device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemset(to: *mut c_void, value: c_int, len: usize) -> cudaError_t {
    boundary(|| {
        recording::refuse_unsafe_call()?;
        let stream = device::current()?.legacy()?;
        if fill(&stream, to as usize, value, len)? == Side::Pinned { stream.drain() } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemsetAsync(to: *mut c_void, value: c_int, len: usize, stream: cudaStream_t) -> cudaError_t {
    boundary(|| fill(&resolve(stream)?, to as usize, value, len).map(|_| ()))
}

fn fill(stream: &Arc<Stream>, to: usize, value: c_int, len: usize) -> Result<Side, CudaError> {
    if len == 0 {
        return Ok(Side::Device);
    }
    let side = side("destination", to, len, Some(true))?;
    let job = move || {
        // SAFETY: the range was live at submission and freeing waits for the device; CUDA
        // defines that only the low byte of `value` counts.
        unsafe { std::ptr::write_bytes(to as *mut u8, value as u8, len) };
        Ok(())
    };
    recording::enqueue(stream, job)?;
    Ok(side)
}

/// Finds out what one side of a copy is, and refuses it when it is not what the caller said:
/// `device` is what the copy kind claims, if it claims anything.
fn side(name: &str, address: usize, len: usize, device: Option<bool>) -> Result<Side, CudaError> {
    let (side, fits) = match heap::classify(address, len) {
        Range::Inside(Memory::Device(_)) => (Side::Device, device != Some(false)),
        Range::Inside(Memory::Pinned(_) | Memory::Registered(_)) => (Side::Pinned, true),
        Range::Pageable => (Side::Pageable, device != Some(true) && address != 0),
        Range::Invalid => {
            report::refusal(&format!(
                "copy or fill: {name} {address:#x} with {len} bytes leaves its allocation or lies \
                 in freed memory"
            ));
            return Err(CudaError::InvalidValue);
        }
    };
    if !fits {
        let expected = if device == Some(true) { "device" } else { "host" };
        report::refusal(&format!("copy or fill: {name} {address:#x} is not {expected} memory"));
        return Err(CudaError::InvalidValue);
    }
    Ok(side)
}

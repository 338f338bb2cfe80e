//! Poison, guards, use after free, and the rules of copies.

use std::ffi::c_void;
use std::os::unix::process::ExitStatusExt;
use std::ptr::null_mut;

use ncclep_hostsim::cuda::copy::*;
use ncclep_hostsim::cuda::memory::*;
use ncclep_hostsim::cuda::stream::cudaDeviceSynchronize;

use crate::kit::*;

const OUT_OF_MEMORY: i32 = 2;
const ILLEGAL_ADDRESS: i32 = 700;
const SIGSEGV: i32 = 11;
const DEFAULT: i32 = 4;

fn pinned(len: usize) -> *mut c_void {
    let mut address = null_mut();
    assert_eq!(cudaHostAlloc(Some(&mut address), len, 2), SUCCESS);
    address
}

#[test]
fn fresh_memory_is_poisoned_and_aligned() {
    own_device();
    for len in [1, 100, 5000, 1 << 20] {
        let buffer = Buffer::new(len);
        assert_eq!(buffer.address as usize % 256, 0);
        assert!(buffer.bytes().iter().all(|byte| *byte == 0xCB));
    }
}

#[test]
fn odd_requests() {
    own_device();
    let mut address = 8 as *mut c_void;
    assert_eq!(cudaMalloc(Some(&mut address), 0), SUCCESS);
    assert!(address.is_null(), "zero bytes give NULL");
    assert_eq!(cudaMalloc(None, 8), INVALID_VALUE);
    assert_eq!(cudaMalloc(Some(&mut address), usize::MAX / 2), OUT_OF_MEMORY);
    assert_eq!(cudaHostAlloc(Some(&mut address), 0, 0), SUCCESS);
    assert_eq!(cudaFree(null_mut()), SUCCESS);
    assert_eq!(cudaFreeHost(null_mut()), SUCCESS);
    let local = 0u64;
    assert_eq!(cudaFree((&raw const local).cast_mut().cast()), INVALID_VALUE);
    let host = pinned(8);
    assert_eq!(cudaFree(host), INVALID_VALUE, "host memory has its own free");
    assert_eq!(cudaFreeHost(host), SUCCESS);
    assert_eq!(cudaFreeHost(host), INVALID_VALUE, "freed twice");
}

/// Runs work that must die of a memory fault.
fn crashes(work: impl Fn()) {
    let output = finish(start(1, &[], work)).remove(0);
    assert_eq!(output.status.signal(), Some(SIGSEGV), "{output:?}");
}

#[test]
fn a_write_past_the_end_crashes() {
    // SAFETY: none: the write must fault.
    crashes(|| unsafe { Buffer::new(5000).address.cast::<u8>().add(5120).write(1) });
}

#[test]
fn a_write_before_the_start_crashes() {
    // SAFETY: none: the write must fault.
    crashes(|| unsafe { Buffer::new(4096).address.cast::<u8>().sub(1).write(1) });
}

#[test]
fn a_read_after_the_free_crashes() {
    crashes(|| {
        let address = Buffer::new(100).address;
        // SAFETY: none: the read must fault.
        unsafe { std::hint::black_box(address.cast::<u8>().read_volatile()) };
    });
}

#[test]
fn damage_in_the_padding_is_reported_when_freeing() {
    let said = processes(1, &[], || {
        let buffer = Buffer::new(100);
        // SAFETY: byte 100 is padding, which is mapped.
        unsafe { buffer.address.cast::<u8>().add(100).write(1) };
        assert_eq!(cudaFree(buffer.address), ILLEGAL_ADDRESS);
        std::mem::forget(buffer);
    });
    assert!(said.contains("memory next to the 100-byte block"), "{said}");
}

#[test]
fn copies_check_direction_and_range() {
    own_device();
    let (one, two) = (Buffer::new(64), Buffer::filled(64, 9));
    let mut local = [0u8; 64];
    let host: *mut c_void = local.as_mut_ptr().cast();
    // SAFETY: all host ranges have 64 bytes.
    let copy = |to, from, len, kind| unsafe { cudaMemcpy(to, from, len, kind) };
    assert_eq!(copy(host, two.address, 64, DEVICE_TO_HOST), SUCCESS);
    assert_eq!(copy(one.address, host, 64, HOST_TO_DEVICE), SUCCESS);
    assert_eq!(copy(one.address, two.address, 64, DEFAULT), SUCCESS);
    assert_eq!(copy(one.address, two.address, 64, HOST_TO_DEVICE), INVALID_VALUE);
    assert_eq!(copy(host, host, 64, DEVICE_TO_HOST), INVALID_VALUE);
    assert_eq!(copy(one.address, two.address, 65, DEVICE_TO_DEVICE), INVALID_VALUE);
    assert_eq!(copy(one.address, null_mut(), 64, HOST_TO_DEVICE), INVALID_VALUE);
    assert_eq!(copy(null_mut(), null_mut(), 0, HOST_TO_DEVICE), SUCCESS);
    assert_eq!(copy(one.address, host, 64, 17), 21);
    assert_eq!(copy(one.address.wrapping_byte_add(64), host, 1, HOST_TO_DEVICE), INVALID_VALUE, "padding");
    assert_eq!(cudaMemset(one.address, 0, 65), INVALID_VALUE);
    assert_eq!(cudaMemset(host, 0, 64), INVALID_VALUE);
    assert_eq!(one.bytes(), [9; 64]);
    let stale = Buffer::new(64).address;
    assert_eq!(copy(host, stale, 64, DEVICE_TO_HOST), INVALID_VALUE);
}

#[test]
fn device_copies_and_fills_are_asynchronous() {
    own_device();
    let stream = Stream::new();
    let (one, two) = (Buffer::filled(16, 1), Buffer::filled(16, 2));
    assert_eq!(cudaDeviceSynchronize(), SUCCESS);
    let gate = Gate::holding(stream.0);
    // SAFETY: both are device memory.
    let code = unsafe { cudaMemcpy(two.address, one.address, 16, DEVICE_TO_DEVICE) };
    assert_eq!(code, SUCCESS);
    assert_eq!(cudaMemset(one.address, 3, 16), SUCCESS);
    assert_eq!(two.peek(), [2; 16], "the stream is still held up");
    gate.open();
    assert_eq!(two.bytes(), [1; 16]);
    assert_eq!(one.bytes(), [3; 16]);
}

#[test]
fn pageable_sources_are_staged_and_pinned_ones_are_not() {
    own_device();
    let stream = Stream::new();
    let (from_pageable, from_pinned) = (Buffer::new(8), Buffer::new(8));
    let mut pageable = [1u8; 8];
    let host = pinned(8);
    // SAFETY: the range was allocated with 8 bytes; nothing else uses it yet.
    unsafe { host.cast::<u8>().write_bytes(1, 8) };
    let gate = Gate::holding(stream.0);
    // SAFETY: all ranges have 8 bytes and live until the stream is done.
    unsafe {
        let source = pageable.as_ptr().cast();
        assert_eq!(cudaMemcpyAsync(from_pageable.address, source, 8, HOST_TO_DEVICE, stream.0), SUCCESS);
        assert_eq!(cudaMemcpyAsync(from_pinned.address, host, 8, HOST_TO_DEVICE, stream.0), SUCCESS);
        pageable.fill(2);
        host.cast::<u8>().write_bytes(2, 8);
    }
    gate.open();
    assert_eq!(from_pageable.bytes(), [1; 8], "taken when called");
    assert_eq!(from_pinned.bytes(), [2; 8], "taken when the stream got there");
    assert_eq!(std::hint::black_box(pageable), [2; 8]);
    assert_eq!(cudaFreeHost(host), SUCCESS);
}

#[test]
fn only_pinned_memory_is_mapped() {
    let host = pinned(16);
    let mut local = [0u8; 16];
    let mut mapped = null_mut();
    let mut map = |host| cudaHostGetDevicePointer(Some(&mut mapped), host, 0);
    assert_eq!(map(host), SUCCESS);
    assert_eq!(map(local.as_mut_ptr().cast()), INVALID_VALUE);
    assert_eq!(mapped, host);
    assert_eq!(cudaFreeHost(host), SUCCESS);
}

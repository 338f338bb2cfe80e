//! The end of everything on a device.
#![allow(unsafe_code)]

use super::error::{boundary, cudaError_t};
use super::{device, event, heap, stream};
use std::sync::atomic::Ordering;

/// Waits for the current device, then ends all its streams, events and allocations.
#[unsafe(no_mangle)]
pub extern "C" fn cudaDeviceReset() -> cudaError_t {
    boundary(|| {
        let device = device::current()?;
        let result = device.synchronize();
        event::forget(device.index);
        stream::forget(device.index);
        device.close_streams();
        heap::release_device(device.index);
        device.resets.fetch_add(1, Ordering::Relaxed);
        result
    })
}

/// How often the current device was reset; drivers number contexts this way.
#[unsafe(no_mangle)]
pub extern "C" fn ncclEpHostsimResets() -> u64 {
    device::current().map_or(0, |device| device.resets.load(Ordering::Relaxed))
}

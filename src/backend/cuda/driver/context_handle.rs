//! CUDA contexts: keeping them alive, entering them, driver calls about them, and not disturbing captures in them.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{Status, call, check, functions};
use crate::error::{Code, Error, Result};
use cudarc::driver::sys;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr::null_mut;

const ALREADY_ENABLED: Status = sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as Status;

/// A context's handle and number, unique among all contexts that the process ever has.
pub type ContextId = (ContextHandle, u64);

/// A context of the driver's: a primary one, kept alive, or a caller's, which the caller may destroy.
#[derive(Debug)]
pub struct DriverContext {
    handle: ContextHandle,
    number: u64,
    /// The device of a primary context, which this keeps alive; `None` for a caller's context.
    retained: Option<Device>,
}

impl DriverContext {
    /// The context `handle`; if it is a primary context that was retained, `retained` is its device.
    pub fn new(handle: ContextHandle, retained: Option<Device>) -> Result<Self> {
        let mut held = Self { handle, number: 0, retained };
        {
            let _entered = held.enter()?;
            held.number = current_context_id()?;
        }
        Ok(held)
    }

    pub fn handle(&self) -> ContextHandle {
        self.handle
    }

    pub fn id(&self) -> ContextId {
        (self.handle, self.number)
    }

    /// Makes this the calling thread's context until the result is dropped.
    pub fn enter(&self) -> Result<Entered> {
        let pushed = current_context()? != Some(self.handle);
        if pushed {
            push_context(self.handle)?;
        }
        Ok(Entered { pushed, this_thread: PhantomData })
    }

    /// As [`Self::enter`], but an error if the caller has destroyed the context or reset its device. Then everything in
    /// it is gone, and its handle may belong to another context.
    pub fn enter_alive(&self) -> Result<Entered> {
        let entered = self.enter()?;
        if current_context_id()? == self.number { Ok(entered) } else { Err(was_reset()) }
    }

    /// As [`Self::enter_alive`], for freeing something on any thread, so without disturbing captures.
    pub fn enter_if_alive(&self) -> Option<(Entered, ApartFromCaptures)> {
        let entered = self.enter_alive().ok()?;
        Some((entered, ApartFromCaptures::enter().ok()?))
    }
}

/// The error of calls that need what was lost with a context.
pub fn was_reset() -> Error {
    Error::new(Code::UnhandledCudaError, "the device was reset, or its context destroyed, while the group existed")
}

impl Drop for DriverContext {
    fn drop(&mut self) {
        if let Some(device) = self.retained {
            // A failure to release cannot be handled.
            let _ = release_primary(device);
        }
    }
}

/// Proof that the calling thread is inside a context; cannot be sent to another thread.
#[derive(Debug)]
#[must_use = "the context is left when this is dropped"]
pub struct Entered {
    pushed: bool,
    this_thread: PhantomData<*const ()>,
}

impl Entered {
    /// Enters once more: the thread stays in the context until both are dropped.
    pub fn again(&self) -> Self {
        Self { pushed: false, this_thread: PhantomData }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.pushed {
            // Fails only if the caller has destroyed the context, and with it this entry.
            let _ = pop_context();
        }
    }
}

/// A context's handle, which is an address that ranks in one process can exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContextHandle(usize);

impl ContextHandle {
    fn raw(self) -> sys::CUcontext {
        self.0 as sys::CUcontext
    }

    pub fn to_bits(self) -> u64 {
        self.0 as u64
    }

    /// The handle that another rank of this process has sent.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits as usize)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device(pub(super) sys::CUdevice);

/// The device that has the number `ordinal` in this process.
pub fn device(ordinal: usize) -> Result<Device> {
    let wanted =
        c_int::try_from(ordinal).map_err(|_| Error::internal(format!("device number {ordinal} is out of range")))?;
    let mut device = 0;
    // SAFETY: writes one number.
    unsafe { call!(cuDeviceGet(&mut device, wanted))? };
    Ok(Device(device))
}

/// The primary context of `device`, to be released once.
pub fn retain_primary(device: Device) -> Result<ContextHandle> {
    let mut context = null_mut();
    // SAFETY: writes one handle.
    unsafe { call!(cuDevicePrimaryCtxRetain(&mut context, device.0))? };
    Ok(ContextHandle(context as usize))
}

fn release_primary(device: Device) -> Result<()> {
    // SAFETY: no pointers are passed; the device came from the driver.
    unsafe { call!(cuDevicePrimaryCtxRelease_v2(device.0)) }
}

pub fn current_context() -> Result<Option<ContextHandle>> {
    let mut context = null_mut();
    // SAFETY: writes one handle.
    unsafe { call!(cuCtxGetCurrent(&mut context))? };
    Ok((!context.is_null()).then_some(ContextHandle(context as usize)))
}

/// The number of the calling thread's context, unique in the process, unlike handles: after a reset, a device has
/// another context with the same handle.
fn current_context_id() -> Result<u64> {
    let mut id = 0;
    // SAFETY: writes one number; NULL stands for the current context.
    unsafe { call!(cuCtxGetId(null_mut(), &mut id))? };
    Ok(id)
}

pub fn current_device() -> Result<Device> {
    let mut device = 0;
    // SAFETY: writes one number.
    unsafe { call!(cuCtxGetDevice(&mut device))? };
    Ok(Device(device))
}

fn push_context(context: ContextHandle) -> Result<()> {
    // SAFETY: the handle came from the driver and its owner is alive.
    unsafe { call!(cuCtxPushCurrent_v2(context.raw())) }
}

fn pop_context() -> Result<()> {
    let mut context = null_mut();
    // SAFETY: writes one handle.
    unsafe { call!(cuCtxPopCurrent_v2(&mut context)) }
}

pub fn synchronize_context() -> Result<()> {
    // SAFETY: no arguments.
    unsafe { call!(cuCtxSynchronize()) }
}

/// Lets the current context access memory of `peer`, a context of this process.
pub fn enable_peer_access(peer: ContextHandle) -> Result<()> {
    // SAFETY: the peer's rank, which sent its handle, is inside the same collective call.
    let status = unsafe { (functions()?.cuCtxEnablePeerAccess)(peer.raw(), 0) };
    if status == ALREADY_ENABLED { Ok(()) } else { check("cuCtxEnablePeerAccess", status) }
}

/// While this exists, the calling thread may query events and free memory during any thread's capture, which would
/// otherwise invalidate captures in the runtime's default mode.
#[derive(Debug)]
#[must_use]
pub struct ApartFromCaptures(sys::CUstreamCaptureMode);

impl ApartFromCaptures {
    pub fn enter() -> Result<Self> {
        exchange_mode(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).map(Self)
    }
}

impl Drop for ApartFromCaptures {
    fn drop(&mut self) {
        // Cannot fail, as the same call in `enter` has succeeded.
        let _ = exchange_mode(self.0);
    }
}

/// Sets this thread's capture mode; returns the previous one.
fn exchange_mode(mut mode: sys::CUstreamCaptureMode) -> Result<sys::CUstreamCaptureMode> {
    // SAFETY: reads and writes one of the three numbers that this enum has had in every driver.
    unsafe { call!(cuThreadExchangeStreamCaptureMode(&mut mode))? };
    Ok(mode)
}

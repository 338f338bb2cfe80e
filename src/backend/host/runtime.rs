//! The functions of the CPU stand-ins (`hostsim`) that this backend calls.
//!
//! They carry the CUDA runtime's names; a marker symbol tells the stand-ins from the real thing.
//! "Device" memory is this process's own memory: what the stand-ins allocated or, as with PyTorch's
//! tensors on the CPU, any other.
#![allow(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::dylib::{Library, function_table};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::ffi::{c_int, c_void};

/// The version of the stand-ins that this backend was written for.
const ABI: c_int = 1;
const ERROR_NOT_READY: c_int = 600;
/// `cudaMemcpyDefault`: a caller's tensors may lie in plain host memory, such as PyTorch's on the CPU.
const ANY_DIRECTION: c_int = 4;

type HostFunction = unsafe extern "C" fn(*mut c_void);

function_table! {
    /// The stand-ins' entry points.
    struct Functions;
    required {
        fn ncclEpHostsimAbi() -> c_int;
        fn cudaMalloc(*mut *mut c_void, usize) -> c_int;
        fn cudaFree(*mut c_void) -> c_int;
        fn cudaMemcpy(*mut c_void, *const c_void, usize, c_int) -> c_int;
        fn cudaHostGetDevicePointer(*mut *mut c_void, *mut c_void, u32) -> c_int;
        fn cudaStreamQuery(*mut c_void) -> c_int;
        fn cudaDeviceSynchronize() -> c_int;
        fn cudaGetLastError() -> c_int;
        fn cudaLaunchHostFunc(*mut c_void, HostFunction, *mut c_void) -> c_int;
    }
    optional {}
}

static FUNCTIONS: OnceCell<Functions> = OnceCell::new();

/// The stand-ins of this process.
#[derive(Clone, Copy)]
pub struct HostRuntime(&'static Functions);

impl HostRuntime {
    /// The stand-ins, if the process has them.
    pub fn detect() -> Result<Option<Self>> {
        if let Some(functions) = FUNCTIONS.get() {
            return Ok(Some(Self(functions)));
        }
        let Some(library) = Library::defining(c"ncclEpHostsimAbi") else {
            return Ok(None);
        };
        let functions = FUNCTIONS.get_or_try_init(|| {
            Functions::load(&library).map_err(|missing| {
                Error::new(
                    Code::SystemError,
                    format!("the CPU stand-ins have no {missing}"),
                )
            })
        })?;
        // SAFETY: takes nothing and returns a number.
        let abi = unsafe { (functions.ncclEpHostsimAbi)() };
        if abi != ABI {
            return Err(
                Error::usage("hostsim", "the CPU stand-ins are of another version").got(abi, ABI),
            );
        }
        Ok(Some(Self(functions)))
    }

    /// Runs `work` on `stream`, after everything enqueued there before.
    pub fn launch(&self, stream: Stream, work: Box<dyn FnOnce() + Send>) -> Result<()> {
        let boxed = Box::into_raw(Box::new(work)).cast::<c_void>();
        // SAFETY: `call_boxed` gets the box that it wants, once.
        let code =
            unsafe { (self.0.cudaLaunchHostFunc)(stream.0 as *mut c_void, call_boxed, boxed) };
        if code != 0 {
            // SAFETY: the function was not enqueued, so the box is still ours.
            drop(unsafe { Box::from_raw(boxed.cast::<Box<dyn FnOnce() + Send>>()) });
        }
        self.check("cudaLaunchHostFunc", code)
    }

    /// The result of `call`, which gave `code`.
    fn check(&self, call: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        self.forget_last_error();
        Err(Error::new(
            Code::UnhandledCudaError,
            format!("{call}: CUDA error {code}"),
        ))
    }

    /// A caller that asks `cudaGetLastError` about its own calls must not be told about this library's.
    fn forget_last_error(&self) {
        // SAFETY: takes nothing and returns a number.
        let _ = unsafe { (self.0.cudaGetLastError)() };
    }

    /// Waits until all streams of this rank are idle.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: takes nothing.
        self.check("cudaDeviceSynchronize", unsafe {
            (self.0.cudaDeviceSynchronize)()
        })
    }
}

/// # Safety
/// `boxed` came from `Box::into_raw` in [`HostRuntime::launch`], and this is its only call.
unsafe extern "C" fn call_boxed(boxed: *mut c_void) {
    // SAFETY: this function's contract.
    let work = unsafe { Box::from_raw(boxed.cast::<Box<dyn FnOnce() + Send>>()) };
    // A panic must not unwind into the stand-ins; the operation's own guard reports it.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
}

impl DeviceMemory for HostRuntime {
    fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        let mut data = std::ptr::null_mut();
        // SAFETY: writes one pointer, which outlives the call.
        self.check("cudaMalloc", unsafe {
            (self.0.cudaMalloc)(&mut data, bytes)
        })?;
        Ok(DevPtr(data as usize))
    }

    fn free(&self, data: DevPtr) -> Result<()> {
        // SAFETY: the stand-ins refuse an address that they did not give.
        self.check("cudaFree", unsafe {
            (self.0.cudaFree)(data.0 as *mut c_void)
        })
    }

    fn device_alias(&self, host: DevPtr) -> Result<DevPtr> {
        let mut device = std::ptr::null_mut();
        // SAFETY: writes one pointer, which outlives the call.
        let code =
            unsafe { (self.0.cudaHostGetDevicePointer)(&mut device, host.0 as *mut c_void, 0) };
        self.check("cudaHostGetDevicePointer", code)?;
        Ok(DevPtr(device as usize))
    }

    fn upload(&self, to: DevPtr, from: &[u8]) -> Result<()> {
        let (to, source) = (to.0 as *mut c_void, from.as_ptr().cast::<c_void>());
        // SAFETY: `from` is as long as said; the trait's callers own `to`.
        self.check("cudaMemcpy", unsafe {
            (self.0.cudaMemcpy)(to, source, from.len(), ANY_DIRECTION)
        })
    }

    fn download(&self, to: &mut [u8], from: DevPtr) -> Result<()> {
        let (target, from) = (to.as_mut_ptr().cast::<c_void>(), from.0 as *const c_void);
        // SAFETY: `to` is as long as said; the trait's callers own `from`.
        self.check("cudaMemcpy", unsafe {
            (self.0.cudaMemcpy)(target, from, to.len(), ANY_DIRECTION)
        })
    }

    fn is_idle(&self, stream: Stream) -> Result<bool> {
        // SAFETY: the stand-ins know their streams.
        match unsafe { (self.0.cudaStreamQuery)(stream.0 as *mut c_void) } {
            ERROR_NOT_READY => {
                self.forget_last_error();
                Ok(false)
            }
            code => self.check("cudaStreamQuery", code).map(|()| true),
        }
    }

    /// The stand-ins free memory without waiting for anything.
    fn strand(&self) {}
}

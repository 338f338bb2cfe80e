//! The embedded kernels, loaded into the current context.
//!
//! All functions are resolved and on the device before a group opens. Loading is impossible while a
//! stream is captured, or while a running kernel waits for the one to be loaded. And it waits for
//! everything on the device.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::function::{self, FunctionHandle};
use crate::backend::cuda::driver::{self, ModuleHandle};
use crate::backend::cuda::kernels::Kernel;
#[cfg(not(nccl_ep_cuda))]
use crate::error::refusal::{OfSettings, Subject};
use crate::error::{Error, Result};
use std::ffi::CString;
use std::sync::Arc;

/// Aligns the embedded bytes as the driver requires.
#[cfg(nccl_ep_cuda)]
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

#[cfg(nccl_ep_cuda)]
static FATBIN: &Aligned<[u8]> = &Aligned(*include_bytes!(env!("NCCL_EP_FATBIN")));

/// The fatbin that `build.rs` made, if it found nvcc.
fn fatbin() -> Result<&'static [u8]> {
    #[cfg(nccl_ep_cuda)]
    return Ok(&FATBIN.0);
    #[cfg(not(nccl_ep_cuda))]
    return Err(Error::usage(Subject::Library, OfSettings::HasKernels));
}

/// The kernels' entry points, by [`Kernel`].
pub type Functions = Arc<[FunctionHandle]>;

/// Loads every kernel into the current context, which keeps them until it ends.
pub fn load() -> Result<Functions> {
    let module = driver::load_module(fatbin()?)?;
    functions_of(module).inspect_err(|_| {
        // The first error is the one that matters.
        let _ = driver::unload_module(module);
    })
}

fn functions_of(module: ModuleHandle) -> Result<Functions> {
    let of = |kernel: &Kernel| {
        let name = CString::new(kernel.name())
            .map_err(|_| Error::internal("a kernel's name contains NUL"))?;
        let entry = function::function(module, &name)?;
        let threads = function::most_threads(entry)?;
        if threads < kernel.threads() {
            return Err(Error::internal(format!(
                "kernel {} may have {threads} threads only",
                kernel.name()
            )));
        }
        Ok(entry)
    };
    Kernel::ALL.iter().map(of).collect()
}

//! The embedded kernels, loaded into the current context.
//!
//! All functions are resolved and on the device before a group opens. Loading is impossible while a stream is captured,
//! or while a running kernel waits for the one to be loaded. And it waits for everything on the device.

use crate::backend::cuda::driver::function::{self, FunctionHandle};
use crate::backend::cuda::driver::{self, ModuleHandle};
use crate::backend::cuda::kernels::Entry;
#[cfg(not(nccl_ep_cuda))]
use crate::error::refusal::{OfSettings, Subject};
use crate::error::{Error, Result};
use std::ffi::CString;
use std::sync::Arc;

/// Aligns the embedded bytes as the driver requires.
#[cfg(nccl_ep_cuda)]
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);

/// The fatbins that `build.rs` made, one for each file of kernels, if it found nvcc.
#[cfg(nccl_ep_cuda)]
static FATBINS: &[&Aligned<[u8]>] = &include!(env!("NCCL_EP_KERNELS"));

fn fatbins() -> Result<Vec<&'static [u8]>> {
    #[cfg(nccl_ep_cuda)]
    return Ok(FATBINS.iter().map(|fatbin| &fatbin.0).collect());
    #[cfg(not(nccl_ep_cuda))]
    return Err(Error::usage(Subject::Library, OfSettings::HasKernels));
}

/// The kernels' entry points, by [`Entry`].
pub type Functions = Arc<[FunctionHandle]>;

/// Loads every kernel into the current context, which keeps them until it ends.
pub fn load() -> Result<Functions> {
    let mut modules = Vec::new();
    let functions = fatbins()?
        .into_iter()
        .try_for_each(|fatbin| {
            modules.push(driver::load_module(fatbin)?);
            Ok(())
        })
        .and_then(|()| functions_of(&modules));
    if functions.is_err() {
        for module in modules {
            // The first error is the one that matters.
            let _ = driver::unload_module(module);
        }
    }
    functions
}

fn functions_of(modules: &[ModuleHandle]) -> Result<Functions> {
    let of = |entry: &Entry| {
        let kernel = entry.definition();
        let name = CString::new(kernel.name).map_err(|_| Error::internal("a kernel's name contains NUL"))?;
        let function = function::function(modules, &name)?;
        let threads = function::most_threads(function)?;
        if threads < kernel.threads {
            return Err(Error::internal(format!("kernel {} may have {threads} threads only", kernel.name)));
        }
        Ok(function)
    };
    Entry::ALL.iter().map(of).collect()
}

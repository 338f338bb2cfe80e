//! The embedded kernels, loaded into a context.
//!
//! All functions are resolved and on the device before a group opens: loading is not possible while a
//! stream is captured, nor while another kernel runs that waits for the one to be loaded, and it waits for
//! everything on the device.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::function::{self, FunctionHandle, LaunchShape};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::driver::{self, ModuleHandle};
use crate::backend::cuda::kernels::{Kernel, KernelParams};
#[cfg(not(nccl_ep_cuda))]
use crate::error::refusal::{OfSettings, Subject};
use crate::error::{Error, Result};
use std::ffi::CString;
use std::ptr::from_ref;
use std::sync::Arc;

/// Keeps the embedded bytes aligned as the driver wants them.
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

/// Loads every kernel into the current context; to be unloaded once.
pub fn load() -> Result<(ModuleHandle, Functions)> {
    let handle = driver::load_module(fatbin()?)?;
    match functions_of(handle) {
        Ok(functions) => Ok((handle, functions)),
        Err(error) => {
            // That error is what matters.
            let _ = driver::unload_module(handle);
            Err(error)
        }
    }
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

/// All kernels, ready to be launched by one group. They stay loaded until it is closed.
pub struct Module {
    context: Arc<Context>,
    functions: Functions,
}

impl Module {
    /// The kernels in `context`.
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        Ok(Self {
            context: Arc::clone(context),
            functions: context.tools()?.functions()?,
        })
    }

    /// The context that the kernels were loaded into.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Enqueues `kernel`, one of those that take `P`.
    pub fn launch<P: KernelParams>(
        &self,
        kernel: Kernel,
        shape: LaunchShape,
        params: &P,
        at: &StreamScope,
    ) -> Result<()> {
        if !P::KERNELS.contains(&kernel) {
            return Err(Error::internal(format!(
                "kernel {} with foreign parameters",
                kernel.name()
            )));
        }
        let entry = self.function(kernel)?;
        // SAFETY: `P` is what this kernel takes: one definition for both sides (`cuda/params.h`).
        unsafe { function::launch(entry, shape, from_ref(params).cast(), at.stream) }
            .map_err(|error| error.within(format_args!("kernel {}", kernel.name())))
    }

    /// The entry point of `kernel`.
    pub fn function(&self, kernel: Kernel) -> Result<FunctionHandle> {
        self.functions
            .get(kernel as usize)
            .copied()
            .ok_or_else(|| Error::internal(format!("kernel {} is not loaded", kernel.name())))
    }
}

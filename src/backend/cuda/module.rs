//! The embedded kernels, loaded into a context.
//!
//! All functions are resolved and on the device when a group opens: loading is not possible while a
//! stream is captured, nor while another kernel runs that waits for the one to be loaded.
#![forbid(unsafe_code)]

use crate::backend::cuda::context::Context;
use crate::backend::cuda::driver::{self, ModuleHandle};
use crate::backend::cuda::function::{self, FunctionHandle};
use crate::backend::cuda::kernels::Kernel;
use crate::error::{Error, Result};
use std::ffi::CString;
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
    return Err(Error::usage(
        "libnccl_ep",
        "was built without CUDA kernels, as there was no nvcc or NCCL_EP_CUDA was off; \
         NCCL_EP_CUDA=require builds them",
    ));
}

/// All kernels, ready to be launched in one context.
#[derive(Debug)]
pub(super) struct Module {
    context: Arc<Context>,
    handle: ModuleHandle,
    functions: Vec<FunctionHandle>,
}

impl Module {
    /// Loads every kernel into `context`.
    pub(super) fn load(context: &Arc<Context>) -> Result<Self> {
        let image = fatbin()?;
        let _entered = context.enter()?;
        let handle = driver::load_module(image)?;
        let mut module = Self {
            context: Arc::clone(context),
            handle,
            functions: Vec::new(),
        };
        for kernel in Kernel::ALL {
            let name = CString::new(kernel.name())
                .map_err(|_| Error::internal("a kernel's name contains NUL"))?;
            let entry = function::function(handle, &name)?;
            let threads = function::most_threads(entry)?;
            if threads < kernel.threads() {
                return Err(Error::internal(format!(
                    "kernel {} may have {threads} threads only",
                    kernel.name()
                )));
            }
            module.functions.push(entry);
        }
        Ok(module)
    }

    /// The context that the kernels were loaded into.
    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The entry point of `kernel`.
    pub(super) fn function(&self, kernel: Kernel) -> Result<FunctionHandle> {
        self.functions
            .get(kernel as usize)
            .copied()
            .ok_or_else(|| Error::internal(format!("kernel {} is not loaded", kernel.name())))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // A context that is gone has unloaded its modules.
        if let Ok(_entered) = self.context.enter() {
            let _ = driver::unload_module(self.handle);
        }
    }
}

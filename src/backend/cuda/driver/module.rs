//! The kernels as one group launches them.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::function::{self, FunctionHandle, LaunchShape};
use crate::backend::cuda::driver::kernel_image::Functions;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::kernels::{Kernel, KernelParams};
use crate::error::{Error, Result};
use std::ptr::from_ref;
use std::sync::Arc;

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
        // SAFETY: `P` is what this kernel takes: one definition for both sides (`cuda/params/params.h`).
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

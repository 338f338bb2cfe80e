//! Launching a kernel with its own parameter struct, and no other.
#![allow(unsafe_code)]

use crate::backend::cuda::function;
use crate::backend::cuda::kernels::{Kernel, KernelParams};
use crate::backend::cuda::module::Module;
use crate::backend::cuda::streams::Place;
use crate::error::{Error, Result};
use std::ptr::from_ref;

pub(super) use crate::backend::cuda::function::LaunchShape;

/// Enqueues `kernel`, one of those that take `P`.
pub(super) fn launch<P: KernelParams>(
    module: &Module,
    kernel: Kernel,
    shape: LaunchShape,
    params: &P,
    at: &Place,
) -> Result<()> {
    if !P::KERNELS.contains(&kernel) {
        return Err(Error::internal(format!(
            "kernel {} with foreign parameters",
            kernel.name()
        )));
    }
    let entry = module.function(kernel)?;
    // SAFETY: `P` is what this kernel takes: one definition for both sides (`cuda/params/params.h`).
    unsafe { function::launch(entry, shape, from_ref(params).cast(), at.stream) }
        .map_err(|error| error.within(format_args!("kernel {}", kernel.name())))
}

//! Launching a kernel with its own parameter struct, and no other.
#![allow(unsafe_code)]

use crate::backend::cuda::driver;
use crate::backend::cuda::kernels::KernelParams;
use crate::backend::cuda::module::Module;
use crate::error::Result;
use crate::model::ops::Stream;
use std::ptr::from_ref;

pub(super) use crate::backend::cuda::driver::LaunchShape;

/// Enqueues the kernel that takes `P` on `stream`.
pub(super) fn launch<P: KernelParams>(
    module: &Module,
    shape: LaunchShape,
    params: &P,
    stream: Stream,
) -> Result<()> {
    let function = module.function(P::KERNEL)?;
    let _entered = module.context().enter()?;
    // SAFETY: `P` is what this kernel takes: one definition for both sides (`cuda/params.h`).
    unsafe { driver::launch(function, shape, from_ref(params).cast(), stream) }
        .map_err(|error| error.within(format_args!("kernel {}", P::KERNEL.name())))
}

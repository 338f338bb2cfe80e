//! Launches kernels for a group.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{check, functions, raw_stream};
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::function::compute_capability;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::kernels::{FunctionHandle, Functions, Kernel, LaunchShape, Line};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use std::sync::Arc;

/// All kernels, loaded in a group's context.
pub struct Module {
    pub context: Arc<Context>,
    functions: Functions,
}

impl Module {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        Ok(Self { context: Arc::clone(context), functions: context.resources()?.functions()? })
    }

    /// Whether kernels may be launched early: their code waits for the kernel before, as code for devices before Hopper
    /// does not, whatever device it runs on.
    pub fn launches_early(&self) -> Result<bool> {
        let any = self.functions_of(Line::peer_selftest).first();
        any.map_or(Ok(false), |function| Ok(compute_capability(*function)? >= 90))
    }

    /// Enters the context for work on `stream`, until the result is dropped.
    pub fn enter(&self, stream: Stream) -> Result<StreamScope> {
        StreamScope::enter(&self.context, stream)
    }

    pub fn launch<P>(&self, kernel: Kernel<P>, shape: LaunchShape, params: &P, at: &StreamScope) -> Result<()> {
        self.launch_on(kernel, shape, params, at.stream)
    }

    /// As [`Self::launch`], for a kernel that begins with `follow_grid` (`cuda/base/ptx.cuh`): with programmatic
    /// dependent launch.
    pub fn launch_early<P>(&self, kernel: Kernel<P>, shape: LaunchShape, params: &P, at: &StreamScope) -> Result<()> {
        self.launch_with(kernel, shape, params, at.stream, true)
    }

    /// As [`Self::launch`], on a stream of the library's own. The calling thread must be inside the context.
    pub fn launch_on<P>(&self, kernel: Kernel<P>, shape: LaunchShape, params: &P, stream: Stream) -> Result<()> {
        self.launch_with(kernel, shape, params, stream, false)
    }

    fn launch_with<P>(
        &self,
        kernel: Kernel<P>,
        shape: LaunchShape,
        params: &P,
        stream: Stream,
        early: bool,
    ) -> Result<()> {
        let function = self.functions_of(kernel.line).get(kernel.number).copied();
        let function = function.ok_or_else(|| Error::internal(format!("kernel {} is not loaded", kernel.name())))?;
        // SAFETY: `P` is what this kernel takes: one list and one definition for both sides (`kernels`, `params`).
        unsafe { launch(function, shape, from_ref(params).cast(), stream, early) }
            .map_err(|error| error.within(format_args!("kernel {}", kernel.name())))
    }

    /// The entry points of a line's kernels, in order.
    pub fn functions_of(&self, line: Line) -> &[FunctionHandle] {
        self.functions.get(line as usize).map(AsRef::as_ref).unwrap_or_default()
    }
}

/// Enqueues a kernel whose only parameter is at `params`; if `early`, with programmatic dependent launch.
///
/// # Safety
/// `params` points to the parameter struct that `function` takes. The driver copies it.
unsafe fn launch(
    function: FunctionHandle,
    shape: LaunchShape,
    params: *const c_void,
    stream: Stream,
    early: bool,
) -> Result<()> {
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: Default::default(),
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: shape.blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: shape.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shape.shared_bytes,
        hStream: raw_stream(stream),
        attrs: &raw mut attribute,
        numAttrs: early.into(),
    };
    let mut arguments = [params.cast_mut()];
    let function = function.0 as sys::CUfunction;
    // SAFETY: the function is loaded and takes one parameter of that type (this function's contract).
    let status = unsafe { (functions()?.cuLaunchKernelEx)(&config, function, arguments.as_mut_ptr(), null_mut()) };
    check("cuLaunchKernelEx", status)
}

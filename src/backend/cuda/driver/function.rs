//! The driver calls about one kernel before it is launched: finding it, its limits.
//!
//! The module that a kernel belongs to is kept by `module`; who calls these functions holds it.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::ModuleHandle;
use crate::backend::cuda::driver::api::{Status, check, functions};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::ffi::{CStr, c_int};
use std::ptr::null_mut;

/// A kernel's entry point.
#[derive(Clone, Copy, Debug)]
pub struct FunctionHandle(pub(super) usize);

/// What a module without a kernel of that name answers.
const NOT_FOUND: Status = sys::CUresult::CUDA_ERROR_NOT_FOUND as Status;

/// The entry point `name`, in whichever of `modules` has it.
pub fn function(modules: &[ModuleHandle], name: &CStr) -> Result<FunctionHandle> {
    let get = functions()?.cuModuleGetFunction;
    let mut function = null_mut();
    let mut status = NOT_FOUND;
    for module in modules {
        // SAFETY: writes one handle; the module is loaded and `name` NUL-terminated.
        status = unsafe { get(&mut function, module.raw(), name.as_ptr()) };
        if status != NOT_FOUND {
            break;
        }
    }
    check("cuModuleGetFunction", status)
        .map_err(|error| error.within(format_args!("kernel {}", name.to_string_lossy())))?;
    Ok(FunctionHandle(function as usize))
}

/// The most threads that a block of `function` may have. Asking also brings the code to the device, which
/// lazy loading would put off until the first launch.
pub fn most_threads(function: FunctionHandle) -> Result<u32> {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    let mut threads = 0;
    // SAFETY: writes one number; the function is loaded.
    let status = unsafe { (functions()?.cuFuncGetAttribute)(&mut threads, attribute, function.0 as sys::CUfunction) };
    check("cuFuncGetAttribute", status)?;
    u32::try_from(threads).map_err(|_| Error::internal(format!("blocks of {threads} threads")))
}

/// Lets blocks of `function` have up to `bytes` of dynamic shared memory.
pub fn allow_shared_bytes(function: FunctionHandle, bytes: u32) -> Result<()> {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let bytes = c_int::try_from(bytes).map_err(|_| Error::internal(format!("{bytes} shared bytes")))?;
    // SAFETY: no pointers are passed; the function is loaded.
    let status = unsafe { (functions()?.cuFuncSetAttribute)(function.0 as sys::CUfunction, attribute, bytes) };
    check("cuFuncSetAttribute", status)
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    pub blocks: u32,
    pub threads: u32,
    /// Dynamic shared memory per block.
    pub shared_bytes: u32,
}

impl LaunchShape {
    /// Without dynamic shared memory.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, shared_bytes: 0 }
    }
}

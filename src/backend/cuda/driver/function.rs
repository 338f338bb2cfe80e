//! Loads the embedded kernels into the current context, and sets their limits.
//!
//! All functions are resolved, and their code is on the device, before a group opens. Later is too late: loading
//! synchronizes the device, and is impossible while a stream is captured or a running kernel waits for the one to load.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{Status, call, check, functions};
use crate::backend::cuda::kernels::{FunctionHandle, Functions, Line};
#[cfg(not(nccl_ep_cuda))]
use crate::error::refusal::{OfSettings, Subject};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::ffi::{CStr, CString, c_int};
use std::ptr::null_mut;

/// The result if a module has no function of that name.
const NOT_FOUND: Status = sys::CUresult::CUDA_ERROR_NOT_FOUND as Status;

/// The entry point `name`, which one of `modules` has.
fn function(modules: &[sys::CUmodule], name: &CStr) -> Result<FunctionHandle> {
    let get = functions()?.cuModuleGetFunction;
    let mut function = null_mut();
    let mut status = NOT_FOUND;
    for module in modules {
        // SAFETY: writes one handle; the module is loaded and `name` NUL-terminated.
        status = unsafe { get(&mut function, *module, name.as_ptr()) };
        if status != NOT_FOUND {
            break;
        }
    }
    check("cuModuleGetFunction", status)
        .map_err(|error| error.within(format_args!("kernel {}", name.to_string_lossy())))?;
    Ok(FunctionHandle(function as usize))
}

/// The most threads that a block of `function` may have. The query also loads the code onto the device, which with lazy
/// loading would otherwise happen at the first launch.
fn most_threads(function: FunctionHandle) -> Result<u32> {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    let mut threads = 0;
    // SAFETY: writes one number; the function is loaded.
    unsafe { call!(cuFuncGetAttribute(&mut threads, attribute, function.0 as sys::CUfunction))? };
    u32::try_from(threads).map_err(|_| Error::internal(format!("blocks of {threads} threads")))
}

/// The compute capability, times ten, that the code of `function` is for; a newer device may run it.
pub fn compute_capability(function: FunctionHandle) -> Result<c_int> {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
    let mut version = 0;
    // SAFETY: writes one number; the function is loaded.
    unsafe { call!(cuFuncGetAttribute(&mut version, attribute, function.0 as sys::CUfunction))? };
    Ok(version)
}

/// Lets blocks of `function` have up to `bytes` of dynamic shared memory.
pub fn allow_shared_bytes(function: FunctionHandle, bytes: u32) -> Result<()> {
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let bytes = c_int::try_from(bytes).map_err(|_| Error::internal(format!("{bytes} shared bytes")))?;
    // SAFETY: no pointers are passed; the function is loaded.
    unsafe { call!(cuFuncSetAttribute(function.0 as sys::CUfunction, attribute, bytes)) }
}

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

/// Loads every kernel into the current context, which keeps them until it ends.
pub fn load() -> Result<Functions> {
    let mut modules = Vec::new();
    let functions = fatbins()?
        .into_iter()
        .try_for_each(|fatbin| {
            modules.push(load_module(fatbin)?);
            Ok(())
        })
        .and_then(|()| functions_of(&modules));
    if functions.is_err() {
        for module in modules {
            // Only the first error is reported.
            let _ = unload_module(module);
        }
    }
    functions
}

fn functions_of(modules: &[sys::CUmodule]) -> Result<Functions> {
    let of = |name: &str, line: Line| {
        let c_name = CString::new(name).map_err(|_| Error::internal("a kernel's name contains NUL"))?;
        let function = function(modules, &c_name)?;
        let threads = most_threads(function)?;
        if threads < line.threads() {
            return Err(Error::internal(format!("kernel {name} may have {threads} threads only")));
        }
        Ok(function)
    };
    Line::ALL.iter().map(|line| line.names().iter().map(|name| of(name, *line)).collect()).collect()
}

/// Loads `image`, an aligned fatbin, into the current context, which keeps it until it ends or [`unload_module`].
fn load_module(image: &'static [u8]) -> Result<sys::CUmodule> {
    let mut module = null_mut();
    // SAFETY: writes one handle; a fatbin carries its own length, and this one is complete.
    unsafe { call!(cuModuleLoadData(&mut module, image.as_ptr().cast()))? };
    Ok(module)
}

fn unload_module(module: sys::CUmodule) -> Result<()> {
    // SAFETY: its owner unloads it once, in the same context.
    unsafe { call!(cuModuleUnload(module)) }
}

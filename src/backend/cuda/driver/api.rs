//! The table of the CUDA driver's functions, and their results as errors.
//!
//! Types and signatures are cudarc's, but not the loader, for three reasons: it panics if a symbol is missing, may open
//! a toolkit's stub beside the process's own libcuda, and returns results as a Rust enum, so that a newer driver's
//! result is undefined behaviour. The loader here returns an error if the machine has no driver.
#![allow(unsafe_code)]

use crate::backend::dylib::{Library, function_table};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use cudarc::driver::sys;
use once_cell::sync::OnceCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

/// A `CUresult` as a number.
pub type Status = c_int;

/// The result of a query if the work has not run yet.
pub const NOT_READY: Status = sys::CUresult::CUDA_ERROR_NOT_READY as Status;

/// As [`function_table`], and checks at compile time that cudarc declares the same signatures.
macro_rules! driver_table {
    ($( fn $name:ident($($type:ty),*); )*) => {
        function_table! {
            /// The driver's entry points, under the versioned names that the header's macros expand to.
            pub struct Functions;
            required { $( fn $name($($type),*) -> Status; )* }
            optional {
                fn cuGetErrorName(Status, *mut *const c_char) -> Status;
                fn cuGetErrorString(Status, *mut *const c_char) -> Status;
            }
        }
        $( const _: unsafe fn($($type),*) -> sys::CUresult = sys::$name; )*
    };
}

driver_table! {
    fn cuInit(c_uint);
    fn cuDeviceGet(*mut sys::CUdevice, c_int);
    fn cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(sys::CUdevice);
    fn cuCtxGetCurrent(*mut sys::CUcontext);
    fn cuCtxPushCurrent_v2(sys::CUcontext);
    fn cuCtxPopCurrent_v2(*mut sys::CUcontext);
    fn cuCtxGetDevice(*mut sys::CUdevice);
    fn cuCtxGetId(sys::CUcontext, *mut c_ulonglong);
    fn cuCtxSynchronize();
    fn cuCtxEnablePeerAccess(sys::CUcontext, c_uint);
    fn cuStreamSynchronize(sys::CUstream);
    fn cuStreamQuery(sys::CUstream);
    fn cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint);
    fn cuStreamGetCaptureInfo_v2(sys::CUstream, *mut sys::CUstreamCaptureStatus, *mut sys::cuuint64_t,
        *mut sys::CUgraph, *mut *const sys::CUgraphNode, *mut usize);
    fn cuUserObjectCreate(*mut sys::CUuserObject, *mut c_void, sys::CUhostFn, c_uint, c_uint);
    fn cuGraphRetainUserObject(sys::CUgraph, sys::CUuserObject, c_uint, c_uint);
    fn cuStreamCreateWithPriority(*mut sys::CUstream, c_uint, c_int);
    fn cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    fn cuStreamDestroy_v2(sys::CUstream);
    fn cuEventCreate(*mut sys::CUevent, c_uint);
    fn cuEventQuery(sys::CUevent);
    fn cuEventRecord(sys::CUevent, sys::CUstream);
    fn cuEventDestroy_v2(sys::CUevent);
    fn cuDeviceGetName(*mut c_char, c_int, sys::CUdevice);
    fn cuThreadExchangeStreamCaptureMode(*mut sys::CUstreamCaptureMode);
    fn cuStreamGetId(sys::CUstream, *mut c_ulonglong);
    fn cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, sys::CUdevice);
    fn cuMemAlloc_v2(*mut sys::CUdeviceptr, usize);
    fn cuMemFree_v2(sys::CUdeviceptr);
    fn cuMemFreeAsync(sys::CUdeviceptr, sys::CUstream);
    fn cuMemGetAddressRange_v2(*mut sys::CUdeviceptr, *mut usize, sys::CUdeviceptr);
    fn cuMemRetainAllocationHandle(*mut sys::CUmemGenericAllocationHandle, *mut c_void);
    fn cuMemExportToShareableHandle(*mut c_void, sys::CUmemGenericAllocationHandle,
        sys::CUmemAllocationHandleType, c_ulonglong);
    fn cuMemImportFromShareableHandle(*mut sys::CUmemGenericAllocationHandle, *mut c_void,
        sys::CUmemAllocationHandleType);
    fn cuMemRelease(sys::CUmemGenericAllocationHandle);
    fn cuMemAddressReserve(*mut sys::CUdeviceptr, usize, usize, sys::CUdeviceptr, c_ulonglong);
    fn cuMemAddressFree(sys::CUdeviceptr, usize);
    fn cuMemMap(sys::CUdeviceptr, usize, usize, sys::CUmemGenericAllocationHandle, c_ulonglong);
    fn cuMemUnmap(sys::CUdeviceptr, usize);
    fn cuMemSetAccess(sys::CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
    fn cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    fn cuMemHostUnregister(*mut c_void);
    fn cuMemHostGetDevicePointer_v2(*mut sys::CUdeviceptr, *mut c_void, c_uint);
    fn cuMemcpyHtoDAsync_v2(sys::CUdeviceptr, *const c_void, usize, sys::CUstream);
    fn cuMemcpyDtoHAsync_v2(*mut c_void, sys::CUdeviceptr, usize, sys::CUstream);
    fn cuIpcGetMemHandle(*mut sys::CUipcMemHandle, sys::CUdeviceptr);
    fn cuIpcOpenMemHandle_v2(*mut sys::CUdeviceptr, sys::CUipcMemHandle, c_uint);
    fn cuIpcCloseMemHandle(sys::CUdeviceptr);
    fn cuModuleLoadData(*mut sys::CUmodule, *const c_void);
    fn cuModuleUnload(sys::CUmodule);
    fn cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char);
    fn cuFuncSetAttribute(sys::CUfunction, sys::CUfunction_attribute, c_int);
    fn cuFuncGetAttribute(*mut c_int, sys::CUfunction_attribute, sys::CUfunction);
    fn cuLaunchKernelEx(*const sys::CUlaunchConfig, sys::CUfunction, *mut *mut c_void, *mut *mut c_void);
}

/// The driver's functions after `cuInit`; after a failure the next call tries again.
static FUNCTIONS: OnceCell<Functions> = OnceCell::new();

/// The driver's functions; an error if this process has no driver.
pub fn functions() -> Result<&'static Functions> {
    FUNCTIONS.get_or_try_init(|| {
        let refuse = |text: String| Error::new(Code::UnhandledCudaError, text);
        let library = Library::find(c"libcuda.so.1", c"cuInit")
            .map_err(|reason| refuse(format!("no CUDA driver on this machine: {reason}")))?;
        let functions = Functions::load(&library)
            .map_err(|missing| refuse(format!("the CUDA driver is too old: it has no {missing}")))?;
        // SAFETY: no pointers are passed; the driver allows repeated initialisation.
        let status = unsafe { (functions.cuInit)(0) };
        check_with(&functions, "cuInit", status)?;
        Ok(functions)
    })
}

/// Calls a driver function; its result is that of [`check`].
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {
        $crate::backend::cuda::driver::api::functions().and_then(|functions| {
            $crate::backend::cuda::driver::api::check(stringify!($name), (functions.$name)($($argument),*))
        })
    };
}
pub(super) use call;

/// `status` as a result; the error names the call, without its version, and has the driver's texts for `status`.
pub fn check(call: &str, status: Status) -> Result<()> {
    if status == 0 { Ok(()) } else { check_with(functions()?, call, status) }
}

fn check_with(functions: &Functions, call: &str, status: Status) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    let call = call.strip_suffix("_v2").unwrap_or(call);
    let name = text(functions.cuGetErrorName, status).unwrap_or_else(|| status.to_string());
    let meaning = text(functions.cuGetErrorString, status).unwrap_or_else(|| "no text".to_owned());
    Err(Error::new(Code::UnhandledCudaError, format!("{call}: {name}, {meaning}")))
}

/// One of the driver's two texts for `status`.
fn text(get: Option<unsafe extern "C" fn(Status, *mut *const c_char) -> Status>, status: Status) -> Option<String> {
    let mut text = std::ptr::null();
    // SAFETY: takes any number; writes one pointer.
    let found = unsafe { get?(status, &mut text) };
    if found != 0 || text.is_null() {
        return None;
    }
    // SAFETY: a NUL-terminated constant of a library that is never unloaded.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// The stream as a driver's handle.
pub fn raw_stream(stream: Stream) -> sys::CUstream {
    stream.0 as sys::CUstream
}

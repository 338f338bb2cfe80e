//! NCCL's memory and windows: here a window only records where this rank's memory is, so that ranks need not meet.
#![allow(unsafe_code)]
#![allow(non_camel_case_types)]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::boundary::{boundary, store};
use super::comm::{find, ncclComm_t};
use super::error::{Code, Failure, Outcome, ncclResult_t};
use crate::cuda::memory::{cudaFree, cudaMalloc};
use crate::handles::Handles;

/// C's `ncclWindow_t`.
pub type ncclWindow_t = *mut c_void;

/// This rank's memory of a window.
struct Window {
    comm: usize,
    data: usize,
}

static WINDOWS: Handles<Window> = Handles::new(0x5700_0000_0000);

fn window_of(comm: ncclComm_t, window: ncclWindow_t) -> Outcome<Arc<Window>> {
    find(comm)?;
    let found = WINDOWS.get(window as usize).filter(|window| window.comm == comm as usize);
    found.ok_or_else(|| Failure::argument("win is NULL, deregistered, or no window of comm"))
}

fn cuda(code: c_int) -> Outcome<()> {
    if code == 0 { Ok(()) } else { Err(Failure::new(Code::UnhandledCudaError, format!("CUDA error {code}"))) }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclMemAlloc(ptr: Option<&mut *mut c_void>, size: usize) -> ncclResult_t {
    boundary(|| cuda(cudaMalloc(ptr, size) as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(ptr: *mut c_void) -> ncclResult_t {
    boundary(|| cuda(cudaFree(ptr) as c_int))
}

/// Creates a window over memory.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowRegister(
    comm: ncclComm_t,
    buff: *mut c_void,
    size: usize,
    win: Option<&mut ncclWindow_t>,
    _flags: c_int,
) -> ncclResult_t {
    boundary(|| {
        find(comm)?;
        if buff.is_null() || size == 0 || win.is_none() {
            return Err(Failure::argument("buff or win is NULL, or size is 0"));
        }
        let made = WINDOWS.insert(Arc::new(Window { comm: comm as usize, data: buff as usize }));
        store(win, made as ncclWindow_t)
    })
}

/// Ends a window; the memory stays.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(comm: ncclComm_t, win: ncclWindow_t) -> ncclResult_t {
    boundary(|| {
        window_of(comm, win)?;
        WINDOWS.remove(win as usize);
        Ok(())
    })
}

/// Where this rank's memory of a window begins; in NCCL since 2.29.
#[unsafe(no_mangle)]
pub extern "C" fn ncclWinGetUserPtr(
    comm: ncclComm_t,
    win: ncclWindow_t,
    ptr: Option<&mut *mut c_void>,
) -> ncclResult_t {
    boundary(|| {
        let window = window_of(comm, win)?;
        store(ptr, window.data as *mut c_void)
    })
}

//! How a thread minds the captures of others.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{check, functions};
use crate::error::Result;
use cudarc::driver::sys;
use std::ffi::c_uint;

/// As long as this lives the calling thread may ask about events, and free, while any thread captures. Otherwise that
/// would end a capture in the mode that is the runtime's default.
#[derive(Debug)]
#[must_use]
pub struct ApartFromCaptures(c_uint);

impl ApartFromCaptures {
    pub fn enter() -> Result<Self> {
        const RELAXED: c_uint = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        exchange_mode(RELAXED).map(Self)
    }
}

impl Drop for ApartFromCaptures {
    fn drop(&mut self) {
        // The same call has succeeded before.
        let _ = exchange_mode(self.0);
    }
}

/// Sets how this thread minds captures; gives how it did before.
fn exchange_mode(mode: c_uint) -> Result<c_uint> {
    let mut mode = mode;
    if let Some(exchange) = functions()?.cuThreadExchangeStreamCaptureMode {
        // SAFETY: reads and writes one number.
        let status = unsafe { exchange(&mut mode) };
        check("cuThreadExchangeStreamCaptureMode", status)?;
    }
    Ok(mode)
}

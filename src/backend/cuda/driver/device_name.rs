//! The driver's name of the GPU: the identity that measurements belong to.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{check, functions};
use crate::backend::cuda::driver::context::Context;
use crate::error::Result;
use std::ffi::c_int;
use std::sync::Arc;

const MOST_BYTES: usize = 256;

/// The name of the context's device, such as "NVIDIA H200"; empty if the driver does not report it.
pub fn device_name(context: &Arc<Context>) -> Result<String> {
    let _entered = context.enter()?;
    let Some(get) = functions()?.cuDeviceGetName else { return Ok(String::new()) };
    let mut device = 0;
    // SAFETY: writes one number.
    check("cuCtxGetDevice", unsafe { (functions()?.cuCtxGetDevice)(&mut device) })?;
    let mut name = [0_u8; MOST_BYTES];
    // SAFETY: writes at most the number of bytes that it is given.
    check("cuDeviceGetName", unsafe { get(name.as_mut_ptr().cast(), MOST_BYTES as c_int, device) })?;
    Ok(String::from_utf8_lossy(name.split(|&byte| byte == 0).next().unwrap_or_default()).into_owned())
}

//! `ncclConfig_t`: which settings are accepted for a communicator.
//!
//! Later versions of NCCL append fields, and `size` says how many a caller knows. The fields up to `splitShare` are
//! those of 2.18, the first version with splits. All but `blocking` concern transports that do not exist here; values
//! that NCCL refuses are refused here, too.
#![allow(unsafe_code)]
#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_uint};
use std::mem::offset_of;
use std::ptr;

use super::error::{Failure, Outcome};

const MAGIC: c_uint = 0xcafe_beef;
/// The value of a field that the caller leaves to NCCL.
const UNDEFINED: c_int = c_int::MIN;

/// C's `ncclConfig_t` as of NCCL 2.18.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclConfig_t {
    /// Bytes of the caller's version of the structure.
    pub size: usize,
    /// Set by `NCCL_CONFIG_INITIALIZER`.
    pub magic: c_uint,
    /// Version of the caller's NCCL header.
    pub version: c_uint,
    /// Whether calls return only when they are complete.
    pub blocking: c_int,
    /// Blocks per cluster.
    pub cgaClusterSize: c_int,
    /// Fewest blocks of a kernel.
    pub minCTAs: c_int,
    /// Most blocks of a kernel.
    pub maxCTAs: c_int,
    /// Name of the network.
    pub netName: *const c_char,
    /// Whether splits share this communicator's resources.
    pub splitShare: c_int,
}

/// Refuses what is not a configuration, and settings that are impossible here.
///
/// # Safety
/// `config` is null or points to an `ncclConfig_t` of the size that it says.
pub(crate) unsafe fn check_config(config: *const ncclConfig_t) -> Outcome<()> {
    const HEADER: usize = offset_of!(ncclConfig_t, blocking);
    if config.is_null() {
        return Ok(());
    }
    // SAFETY: by this function's contract; every version begins with these fields.
    let (size, magic, version) = unsafe { ((*config).size, (*config).magic, (*config).version) };
    if magic != MAGIC {
        return Err(Failure::argument("config was not set with NCCL_CONFIG_INITIALIZER"));
    }
    if size < HEADER || version == 0 {
        return Err(Failure::argument("config has an impossible size or version"));
    }
    let mut known = ncclConfig_t::default();
    let bytes = size.min(size_of::<ncclConfig_t>());
    // SAFETY: the caller's structure has `size` bytes, and `known` at least as many as are copied;
    // any bytes are valid for the fields.
    unsafe { ptr::copy_nonoverlapping(config.cast::<u8>(), (&raw mut known).cast(), bytes) };
    known.check()
}

impl Default for ncclConfig_t {
    /// The content of `NCCL_CONFIG_INITIALIZER` in NCCL 2.18.
    fn default() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: 21_800,
            blocking: UNDEFINED,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: ptr::null(),
            splitShare: UNDEFINED,
        }
    }
}

impl ncclConfig_t {
    fn check(&self) -> Outcome<()> {
        let within = |name, value: c_int, range: std::ops::RangeInclusive<c_int>| {
            if value == UNDEFINED || range.contains(&value) {
                return Ok(());
            }
            Err(Failure::argument(format!("config.{name} is {value}")))
        };
        within("blocking", self.blocking, 0..=1)?;
        within("cgaClusterSize", self.cgaClusterSize, 0..=c_int::MAX)?;
        within("minCTAs", self.minCTAs, 1..=c_int::MAX)?;
        within("maxCTAs", self.maxCTAs, 1..=c_int::MAX)?;
        within("splitShare", self.splitShare, 0..=1)?;
        if self.maxCTAs != UNDEFINED && self.minCTAs > self.maxCTAs {
            let text = format!("config.minCTAs {} is above maxCTAs {}", self.minCTAs, self.maxCTAs);
            return Err(Failure::argument(text));
        }
        if self.blocking == 0 {
            let text = "config.blocking is 0, and the stand-ins have only communicators that block";
            return Err(Failure::argument(text));
        }
        Ok(())
    }
}

//! Memory of a group for views: rows of rank-major dispatches for which the caller gives no tensor.

use crate::backend::device::Memory;
use crate::backend::host::runtime::HostRuntime;
use crate::error::Result;
use crate::model::ops::ViewBank;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;

/// The memory, of the stand-ins' device, made when the first view is asked for. It stays where it is.
pub struct Views {
    runtime: HostRuntime,
    bank_bytes: usize,
    banks: OnceCell<DevPtr>,
}

impl Views {
    /// None yet; a bank will have `bank_bytes`.
    pub fn new(runtime: HostRuntime, bank_bytes: usize) -> Self {
        Self { runtime, bank_bytes, banks: OnceCell::new() }
    }

    fn bytes(&self) -> usize {
        ViewBank::COUNT * self.bank_bytes
    }

    /// The address of `bank`.
    pub fn at(&self, bank: ViewBank) -> Result<DevPtr> {
        let make = || self.runtime.alloc_own(self.bytes());
        Ok(DevPtr(self.banks.get_or_try_init(make)?.0 + bank.index() * self.bank_bytes))
    }
}

impl Drop for Views {
    fn drop(&mut self) {
        if let Some(&banks) = self.banks.get() {
            self.runtime.free_own(banks, self.bytes());
        }
    }
}

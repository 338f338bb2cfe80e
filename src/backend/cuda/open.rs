//! What every kernel of an open group needs: the loaded kernels, the peers' windows, the deadline.
#![forbid(unsafe_code)]

use crate::backend::cuda::fault::FaultPage;
use crate::backend::cuda::module::Module;
use crate::backend::cuda::params::{MAX_PEERS, PeerTable, WaitParams};
use crate::backend::cuda::sizes::number;
use crate::error::Result;
use crate::model::tensor::DevPtr;

/// An open group, as its operations see it. The windows stay mapped until the group closes.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) module: Module,
    pub(super) faults: FaultPage,
    /// Multiprocessors of the device: the most blocks that surely run at the same time.
    pub(super) multiprocessors: u32,
    /// Device memory: the group's failure mark.
    failed: DevPtr,
    windows: [DevPtr; MAX_PEERS],
    ranks: u32,
    rank: u32,
}

impl Open {
    /// A group whose ranks have these `windows`, `rank` being this one; `failed` is its failure mark.
    pub(super) fn new(
        module: Module,
        faults: FaultPage,
        multiprocessors: u32,
        failed: DevPtr,
        (windows, rank): (&[DevPtr], usize),
    ) -> Result<Self> {
        let mut all = [DevPtr::default(); MAX_PEERS];
        for (to, base) in all.iter_mut().zip(windows) {
            *to = *base;
        }
        Ok(Self {
            module,
            faults,
            multiprocessors,
            failed,
            windows: all,
            ranks: number(windows.len())?,
            rank: number(rank)?,
        })
    }

    /// The windows of all ranks, as kernels take them.
    pub(super) fn peers(&self) -> PeerTable {
        PeerTable {
            window: self.windows.map(|base| base.0 as *mut u8),
            ranks: self.ranks,
            rank: self.rank,
        }
    }

    /// Deadline and report of kernel `op`.
    pub(super) fn wait(&self, op: u32) -> WaitParams {
        self.faults.wait_params(op, self.failed)
    }
}

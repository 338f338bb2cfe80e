//! What every kernel of an open group needs: the loaded kernels, the peers' windows, the deadline.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::module::Module;
use crate::backend::cuda::fault::{FaultPage, nanoseconds};
use crate::backend::cuda::params::{LL_CHANNELS, LlChannelState, MAX_PEERS, PeerTable, WaitParams};
use crate::backend::cuda::sizes::number;
use crate::error::Result;
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::time::Duration;

/// Where the states of the LL channels are: in the same 128 bytes as the failure mark before them, so that
/// one access of memory has both.
const CHANNEL_STATES: usize = 64;
const STATE_BYTES: usize = CHANNEL_STATES + LL_CHANNELS as usize * size_of::<LlChannelState>();
const _: () = assert!(STATE_BYTES <= 128);

/// An open group, as its operations see it. The windows stay mapped until the group closes.
pub(super) struct GroupContext {
    pub(super) module: Module,
    pub(super) faults: Arc<FaultPage>,
    /// Multiprocessors of the device: the most blocks that surely run at the same time.
    pub(super) multiprocessors: u32,
    /// The group's failure mark, and the states of the LL channels: all that a kernel loads first.
    state: Buffer,
    /// In this rank's window: which peer has told of its failure.
    told: DevPtr,
    windows: [DevPtr; MAX_PEERS],
    ranks: u32,
    rank: u32,
}

impl GroupContext {
    /// What a group's kernels keep from one to the next, before the first.
    pub(super) fn new_state(memory: &Arc<CudaMemory>) -> Result<Buffer> {
        Buffer::zeroed(memory, STATE_BYTES)
    }

    /// A group whose ranks have these `windows`, `rank` being this one; `told` is where peers tell of their
    /// failures.
    pub(super) fn new(
        module: Module,
        faults: Arc<FaultPage>,
        multiprocessors: u32,
        (state, told): (Buffer, DevPtr),
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
            state,
            told,
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
        self.faults.wait_params(op, self.state.data(), self.told)
    }

    /// The same with a deadline that is nearer.
    pub(super) fn wait_at_most(&self, left: Duration, op: u32) -> WaitParams {
        WaitParams {
            timeout_ns: nanoseconds(left),
            ..self.wait(op)
        }
    }

    /// The states of the LL channels.
    pub(super) fn channel_states(&self) -> *mut LlChannelState {
        (self.state.data().0 + CHANNEL_STATES) as *mut LlChannelState
    }
}

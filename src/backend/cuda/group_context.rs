//! What every kernel of an open group needs: loaded kernels, peers' windows, deadline.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::module::Module;
use crate::backend::cuda::fault::{FaultPage, nanoseconds};
use crate::backend::cuda::params::common::{MAX_PEERS, PeerTable, WaitParams};
use crate::backend::cuda::params::ll::{LL_CHANNELS, LlChannelState};
use crate::backend::cuda::sizes::number;
use crate::error::Result;
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::time::Duration;

/// Offset of the LL channel states: in the same 128 bytes as the failure mark before them, so that
/// one memory access fetches both.
const CHANNEL_STATES: usize = 64;
const STATE_BYTES: usize = CHANNEL_STATES + LL_CHANNELS as usize * size_of::<LlChannelState>();
const _: () = assert!(STATE_BYTES <= 128);

/// An open group, as its operations see it. The windows stay mapped until the group closes.
pub(super) struct GroupContext {
    pub(super) module: Module,
    pub(super) faults: Arc<FaultPage>,
    /// Multiprocessors of the device: the most blocks that are sure to run at the same time.
    pub(super) multiprocessors: u32,
    /// The group's failure mark and the states of the LL channels: the words that a kernel loads
    /// first.
    state: Buffer,
    /// In this rank's window: the peer that has reported its failure.
    peer_failed: DevPtr,
    windows: [DevPtr; MAX_PEERS],
    ranks: u32,
    rank: u32,
}

impl GroupContext {
    /// New memory for the state that kernels keep from one launch to the next.
    pub(super) fn new_state(memory: &Arc<CudaMemory>) -> Result<Buffer> {
        Buffer::zeroed(memory, STATE_BYTES)
    }

    /// A group with the `windows` of all ranks; `rank` is this one. Peers report their failures at
    /// `peer_failed`.
    pub(super) fn new(
        module: Module,
        faults: Arc<FaultPage>,
        multiprocessors: u32,
        (state, peer_failed): (Buffer, DevPtr),
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
            peer_failed,
            windows: all,
            ranks: number(windows.len())?,
            rank: number(rank)?,
        })
    }

    /// The windows of all ranks, as a kernel parameter.
    pub(super) fn peers(&self) -> PeerTable {
        PeerTable {
            window: self.windows.map(|base| base.0 as *mut u8),
            ranks: self.ranks,
            rank: self.rank,
        }
    }

    /// Deadline and report of kernel `op`.
    pub(super) fn wait(&self, op: u32) -> WaitParams {
        self.faults
            .wait_params(op, self.state.data(), self.peer_failed)
    }

    /// The same with the nearer deadline `left`.
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

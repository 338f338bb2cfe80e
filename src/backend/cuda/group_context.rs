//! What every launch of an open group needs: the loaded kernels, the peers' windows, the timeout.

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::driver::module::Module;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::fault::{FaultPage, nanoseconds};
use crate::backend::cuda::kernels::{Kernel, LaunchShape};
use crate::backend::cuda::params::common::{KernelOp, MAX_PEERS, PeerTable, WaitParams};
use crate::backend::cuda::params::ll::{LL_CHANNELS, LlChannelState};
use crate::backend::device::{Blocks, Memory};
use crate::backend::objects::Recognised;
use crate::error::Result;
use crate::model::ids::LocalRank;
use crate::model::objects::{MAX_OBJECTS, ObjectOffset};
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Offset of the LL channel states: in the same 128 bytes as the failure mark, so that one memory access gets both.
const CHANNEL_STATES: usize = 64;
const STATE_BYTES: usize = CHANNEL_STATES + LL_CHANNELS as usize * size_of::<LlChannelState>();
const _: () = assert!(STATE_BYTES <= 128);

/// The part of an open group that its operations use. The windows stay mapped until the group closes.
pub(super) struct GroupContext {
    pub(super) module: Module,
    pub(super) faults: Arc<FaultPage>,
    /// The most blocks that may wait for other ranks at the same time: one per multiprocessor of the device, except
    /// those that the caller reserves for other work or, over several nodes, the library for the network.
    pub(super) multiprocessors: u32,
    /// Allocates the blocks of handles, if the caller has set an allocator.
    pub(super) blocks: OnceLock<Arc<dyn Blocks>>,
    /// Whether kernels may use programmatic dependent launch.
    pub(super) programmatic: bool,
    /// The group's failure mark and the states of the LL channels: the words that a kernel loads first.
    state: Buffer,
    pub(super) objects: Objects,
    // As kernel parameters, ready to be copied into every launch.
    peers: PeerTable,
    wait: WaitParams,
}

/// The kernel parameter for memory of this node's ranks, at `bases`; `rank` is this one.
pub(super) fn peer_table(bases: impl ExactSizeIterator<Item = usize>, rank: LocalRank) -> PeerTable {
    let mut table = PeerTable { window: [null_mut(); MAX_PEERS], ranks: bases.len() as u32, rank: rank.word() };
    for (to, base) in table.window.iter_mut().zip(bases) {
        *to = base as *mut u8;
    }
    table
}

/// A group's device memory besides its window.
pub(super) struct DeviceState {
    state: Buffer,
    objects: Objects,
}

impl DeviceState {
    /// For a group with `ranks` ranks on this node.
    pub(super) fn new(memory: &Arc<CudaMemory>, ranks: usize) -> Result<Self> {
        Ok(Self { state: Buffer::zeroed(memory, STATE_BYTES)?, objects: Objects::new(memory, ranks)? })
    }
}

/// Limits of a group's launches.
pub(super) struct LaunchLimits {
    /// As [`GroupContext::multiprocessors`].
    pub(super) multiprocessors: u32,
    /// As [`GroupContext::programmatic`].
    pub(super) programmatic: bool,
}

impl GroupContext {
    /// A group with the `windows` of this node's ranks; `rank` is this one's local index. A peer that fails sets the
    /// word at `peer_failed`.
    pub(super) fn new(
        module: Module,
        faults: Arc<FaultPage>,
        launches: LaunchLimits,
        state: DeviceState,
        peer_failed: DevPtr,
        windows: &[DevPtr],
        rank: LocalRank,
    ) -> Self {
        Self {
            module,
            wait: faults.wait_params(KernelOp::PeerSelftest, state.state.data(), peer_failed),
            faults,
            multiprocessors: launches.multiprocessors,
            blocks: OnceLock::new(),
            programmatic: launches.programmatic,
            state: state.state,
            objects: state.objects,
            peers: peer_table(windows.iter().map(|base| base.0), rank),
        }
    }

    /// Uninitialised memory for a handle's block.
    pub(super) fn block(&self, memory: &Arc<CudaMemory>, bytes: usize) -> Result<Buffer> {
        match self.blocks.get() {
            Some(blocks) => Ok(Buffer::of_caller(memory, blocks.take(bytes)?)),
            None => Buffer::new(memory, bytes),
        }
    }

    /// Enqueues a kernel that begins with `follow_grid` (`cuda/base/ptx.cuh`), with programmatic dependent launch
    /// unless the group or this launch (`in_order`) forbids it.
    pub(super) fn launch_following<P>(
        &self,
        kernel: Kernel<P>,
        shape: LaunchShape,
        params: &P,
        in_order: bool,
        at: &StreamScope,
    ) -> Result<()> {
        if self.programmatic && !in_order {
            self.module.launch_early(kernel, shape, params, at)
        } else {
            self.module.launch(kernel, shape, params, at)
        }
    }

    pub(super) fn peers(&self) -> &PeerTable {
        &self.peers
    }

    /// This rank, among those of its node.
    pub(super) fn rank(&self) -> LocalRank {
        LocalRank::from(self.peers.rank)
    }

    fn window(&self, rank: LocalRank) -> DevPtr {
        self.peers.window.get(rank.index()).map_or_else(DevPtr::default, |&base| DevPtr(base as usize))
    }

    /// This rank's window.
    pub(super) fn own_window(&self) -> DevPtr {
        self.window(self.rank())
    }

    /// The words that the host must write on the device after a failure that no kernel has seen: this rank's own mark,
    /// and in each peer's window the word that says that a peer has failed.
    pub(super) fn failure_marks(&self) -> Vec<(DevPtr, u32)> {
        let own = (self.state.data(), 1);
        let peers = (0..self.peers.ranks).filter(|&peer| peer != self.peers.rank).map(LocalRank::from);
        let offset = self.wait.peer_failed as usize - self.own_window().0;
        let announced = peers.map(|peer| (DevPtr(self.window(peer).0 + offset), 1 + self.peers.rank));
        std::iter::once(own).chain(announced).collect()
    }

    /// Timeout and fault report for kernel `op`.
    pub(super) fn wait(&self, op: KernelOp) -> WaitParams {
        WaitParams { op, ..self.wait }
    }

    /// As [`Self::wait`], with the timeout `left`.
    pub(super) fn wait_at_most(&self, left: Duration, op: KernelOp) -> WaitParams {
        WaitParams { timeout_ns: nanoseconds(left), ..self.wait(op) }
    }

    pub(super) fn channel_state(&self, channel: u32) -> *mut LlChannelState {
        let states = (self.state.data().0 + CHANNEL_STATES) as *mut LlChannelState;
        states.wrapping_add(channel as usize)
    }
}

const ADDRESS_BYTES: usize = size_of::<u64>();

/// The objects of a group, that is the memory that ranks have registered and their peers have mapped: tells which
/// object holds a tensor, and tells kernels the peers' addresses. The table of addresses exists before any object, and
/// a row changes only while no operation uses its object, so that graphs can use objects made after their capture.
pub(super) struct Objects {
    memory: Arc<CudaMemory>,
    pub(super) recognised: Arc<Recognised>,
    table: Buffer,
    fallbacks: OnceCell<HostPage<u64>>,
    /// Ranks of this node.
    ranks: usize,
}

impl Objects {
    /// No objects yet; the group has `ranks` on this node.
    pub(super) fn new(memory: &Arc<CudaMemory>, ranks: usize) -> Result<Self> {
        Ok(Self {
            memory: Arc::clone(memory),
            recognised: Arc::default(),
            table: Buffer::zeroed(memory, Self::table_bytes(ranks))?,
            fallbacks: OnceCell::new(),
            ranks,
        })
    }

    /// Device memory that the table takes.
    const fn table_bytes(ranks: usize) -> usize {
        MAX_OBJECTS * ranks * ADDRESS_BYTES
    }

    /// The object and offset of a tensor of `bytes` at `address`, if peers can reach it.
    pub(super) fn locate(&self, address: u64, bytes: u64) -> Option<ObjectOffset> {
        self.recognised.locate(address, bytes)
    }

    /// Whether the group has an object; at the same point of the sequence of operations all ranks get the same answer.
    pub(super) fn any(&self) -> bool {
        self.recognised.any()
    }

    /// The device address of `u64 [MAX_OBJECTS][ranks]`: where this rank has mapped the memory of each local rank for
    /// each object; 0 if there is none.
    pub(super) fn table(&self) -> u64 {
        self.table.data().0 as u64
    }

    /// The device address of the counter of operations that could not access this rank's tensor in place.
    pub(super) fn fallbacks_on_device(&self) -> Result<*mut u64> {
        Ok(self.page()?.device())
    }

    /// The page of that counter, allocated with the first object: allocating would be illegal while a stream captures.
    fn page(&self) -> Result<&HostPage<u64>> {
        self.fallbacks.get_or_try_init(|| HostPage::new(&self.memory.context, 1))
    }

    /// The number of operations that could not access this rank's tensor in place.
    pub(super) fn fallbacks(&self) -> u64 {
        self.fallbacks.get().and_then(|page| page.read(0)).unwrap_or_default()
    }

    /// Writes the table's row for `object`: the addresses of the ranks' memory, or nothing (zeros) if the object ends.
    pub(super) fn write(&self, object: u32, bases: &[usize]) -> Result<()> {
        self.page()?;
        let row = self.ranks * ADDRESS_BYTES;
        let mut bytes: Vec<u8> = bases.iter().flat_map(|it| it.to_ne_bytes()).collect();
        bytes.resize(row, 0);
        self.memory.upload(DevPtr(self.table.data().0 + object as usize * row), &bytes)
    }
}

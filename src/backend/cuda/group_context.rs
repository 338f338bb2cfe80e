//! What every kernel of an open group needs: loaded kernels, peers' windows, deadline.

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
use crate::model::objects::{MAX_OBJECTS, Place};
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};
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
    /// The most blocks of this group that may wait for other ranks at the same time: the device's multiprocessors,
    /// except those reserved for others.
    pub(super) multiprocessors: u32,
    /// Supplies the blocks of handles, in place of the library's memory.
    pub(super) blocks: OnceLock<Arc<dyn Blocks>>,
    /// Whether kernels may be launched before the kernels that they wait for end.
    pub(super) programmatic: bool,
    /// The group's failure mark and the states of the LL channels: the words that a kernel loads first.
    state: Buffer,
    pub(super) objects: Objects,
    // In the kernels' form, since every launch needs them.
    peers: PeerTable,
    wait: WaitParams,
}

/// Memory of this node's ranks at `bases`, of which `rank` is this one, in the kernels' form.
pub(super) fn peer_table(bases: impl ExactSizeIterator<Item = usize>, rank: LocalRank) -> PeerTable {
    let mut table = PeerTable { window: [null_mut(); MAX_PEERS], ranks: bases.len() as u32, rank: rank.word() };
    for (to, base) in table.window.iter_mut().zip(bases) {
        *to = base as *mut u8;
    }
    table
}

/// What a group keeps on the device besides its window.
pub(super) struct Kept {
    state: Buffer,
    objects: Objects,
}

impl Kept {
    /// New memory for a group with so many `ranks` on this node.
    pub(super) fn new(memory: &Arc<CudaMemory>, ranks: usize) -> Result<Self> {
        Ok(Self { state: Buffer::zeroed(memory, STATE_BYTES)?, objects: Objects::new(memory, ranks)? })
    }
}

/// What bounds a group's launches.
pub(super) struct Launches {
    /// As [`GroupContext::multiprocessors`].
    pub(super) multiprocessors: u32,
    /// As [`GroupContext::programmatic`].
    pub(super) programmatic: bool,
}

impl GroupContext {
    /// A group with the `windows` of this node's ranks; `rank` is this one's local index. Peers report their
    /// failures at `peer_failed`.
    pub(super) fn new(
        module: Module,
        faults: Arc<FaultPage>,
        launches: Launches,
        kept: Kept,
        peer_failed: DevPtr,
        windows: &[DevPtr],
        rank: LocalRank,
    ) -> Self {
        Self {
            module,
            wait: faults.wait_params(KernelOp::PeerSelftest, kept.state.data(), peer_failed),
            faults,
            multiprocessors: launches.multiprocessors,
            blocks: OnceLock::new(),
            programmatic: launches.programmatic,
            state: kept.state,
            objects: kept.objects,
            peers: peer_table(windows.iter().map(|base| base.0), rank),
        }
    }

    /// Memory for a handle's block, with arbitrary content.
    pub(super) fn block(&self, memory: &Arc<CudaMemory>, bytes: usize) -> Result<Buffer> {
        match self.blocks.get() {
            Some(blocks) => Ok(Buffer::given(memory, blocks.take(bytes)?)),
            None => Buffer::new(memory, bytes),
        }
    }

    /// Enqueues a kernel that begins with `follow_grid` (`cuda/base/ptx.cuh`): launched early, unless the group or this
    /// launch, `in_order`, forbids it.
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

    /// Words on the device that the host writes after a failure that no kernel has seen: this rank's own mark, and in
    /// its peers' windows the word that says that a peer has failed.
    pub(super) fn failure_marks(&self) -> Vec<(DevPtr, u32)> {
        let own = (self.state.data(), 1);
        let peers = (0..self.peers.ranks).filter(|&peer| peer != self.peers.rank).map(LocalRank::from);
        let offset = self.wait.peer_failed as usize - self.own_window().0;
        let announced = peers.map(|peer| (DevPtr(self.window(peer).0 + offset), 1 + self.peers.rank));
        std::iter::once(own).chain(announced).collect()
    }

    /// Deadline and fault report for kernel `op`.
    pub(super) fn wait(&self, op: KernelOp) -> WaitParams {
        WaitParams { op, ..self.wait }
    }

    /// The same with only `left` until the deadline.
    pub(super) fn wait_at_most(&self, left: Duration, op: KernelOp) -> WaitParams {
        WaitParams { timeout_ns: nanoseconds(left), ..self.wait(op) }
    }

    pub(super) fn channel_state(&self, channel: u32) -> *mut LlChannelState {
        let states = (self.state.data().0 + CHANNEL_STATES) as *mut LlChannelState;
        states.wrapping_add(channel as usize)
    }
}

const ADDRESS_BYTES: usize = size_of::<u64>();

/// The objects of a group, memory of the ranks that their peers map, as its operations see them: where tensors lie, and
/// where kernels find the peers' memory. The table exists before any object, and a row of it changes only while no
/// operation uses its object: so graphs can use objects made after their capture.
pub(super) struct Objects {
    memory: Arc<CudaMemory>,
    pub(super) recognised: Arc<Recognised>,
    table: Buffer,
    fallbacks: OnceCell<HostPage<u64>>,
    /// Ranks of this node.
    ranks: usize,
}

impl Objects {
    /// No objects yet, in a group with `ranks` on this node.
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

    /// Where a tensor of `bytes` at `address` lies, if peers can reach it.
    pub(super) fn place_of(&self, address: u64, bytes: u64) -> Option<Place> {
        self.recognised.place_of(address, bytes)
    }

    /// Whether the group has an object; between two given operations all ranks answer alike.
    pub(super) fn any(&self) -> bool {
        self.recognised.any()
    }

    /// The device address of `u64 [MAX_OBJECTS][ranks]`: this rank's address of the memory that each rank of this node
    /// has for an object, by local rank; 0 if none.
    pub(super) fn table(&self) -> u64 {
        self.table.data().0 as u64
    }

    /// Where kernels count operations that could not access this rank's tensor in place.
    pub(super) fn fallbacks_on_device(&self) -> Result<*mut u64> {
        Ok(self.page()?.device())
    }

    /// Allocated with the first object, as an operation may be captured.
    fn page(&self) -> Result<&HostPage<u64>> {
        self.fallbacks.get_or_try_init(|| HostPage::new(&self.memory.context, 1))
    }

    /// The number of those operations.
    pub(super) fn fallbacks(&self) -> u64 {
        self.fallbacks.get().and_then(|page| page.read(0)).unwrap_or_default()
    }

    /// Tells kernels the addresses of the ranks' memory of `object`; zeros for one that ends.
    pub(super) fn write(&self, object: u32, bases: &[usize]) -> Result<()> {
        self.page()?;
        let row = self.ranks * ADDRESS_BYTES;
        let mut bytes: Vec<u8> = bases.iter().flat_map(|it| it.to_ne_bytes()).collect();
        bytes.resize(row, 0);
        self.memory.upload(DevPtr(self.table.data().0 + object as usize * row), &bytes)
    }
}

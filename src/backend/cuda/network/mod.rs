//! The network between a group's nodes: what operations of both modes need, and how a failure of the network ends the
//! group.

pub mod two_sided;

use crate::backend::Faults;
use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::driver::context_handle::ApartFromCaptures;
use crate::backend::cuda::driver::event::MOST_CAPTURES;
use crate::backend::cuda::driver::graph_marks;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::{Capture, is_captured};
use crate::backend::cuda::fault::FaultPage;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::network::two_sided::Exchanges;
use crate::backend::cuda::params::common::OWN_NODE_FIRST;
use crate::backend::cuda::params::ht_nodes::HT_NONE;
use crate::backend::device::{Device, Memory, OwnStream};
use crate::backend::net::OnFault;
use crate::backend::net::two_sided::open::{Wanted, over_nccl};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::ids::{GroupRank, Node};
use crate::model::node_view::NodeView;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;

/// Most blocks of a network kernel; each fills a multiprocessor.
pub const NETWORK_BLOCKS: u32 = 4;
/// Multiprocessors that kernels which wait for other ranks leave free: for the network's kernels, and for the caller's
/// own collectives on other streams, which also wait for other ranks.
const RESERVED: u32 = NETWORK_BLOCKS + 32;
/// The most blocks that may wait for other ranks at the same time on a device with `multiprocessors`.
pub fn blocks_beside_network(multiprocessors: u32) -> u32 {
    multiprocessors
        .checked_sub(RESERVED)
        .filter(|&left| left > multiprocessors / 2)
        .unwrap_or(multiprocessors / 2)
        .max(1)
}

/// The network of a group on several nodes.
pub struct Network {
    pub view: Arc<NodeView>,
    pub on_device: OnDevice,
    /// Carries the messages of operations.
    pub exchanges: Exchanges,
    failure: Arc<Failure>,
}

/// The network's resources on the device: tables of ranks and nodes, which kernels read, and streams.
pub struct OnDevice {
    _tables: Buffer,
    /// `RankOnNode [ranks]`.
    pub of_rank: DevPtr,
    /// `[local ranks]`: their ranks in the group.
    pub local_ranks: DevPtr,
    /// `[local ranks][1 + width]`: the ranks that each forwards for, itself first; padded with `HT_NONE`.
    pub forwarded_by: DevPtr,
    /// The ranks that this one forwards for, itself first.
    pub forwarded: DevPtr,
    /// In summation order.
    pub rail_peers: DevPtr,
    /// For work beside the caller's streams.
    pub side: SideStreams,
}

impl OnDevice {
    pub fn new(memory: &Arc<CudaMemory>, view: &NodeView) -> Result<Self> {
        let mut of_rank = Vec::new();
        for seen in &view.of_rank {
            let peer = seen.local.map_or(-1, |it| it.word().cast_signed());
            of_rank.extend([peer.cast_unsigned(), seen.forwarder.word()]);
            of_rank.extend([seen.source.word(), to_u32(seen.distance)?]);
        }
        let row = 1 + view.width();
        let mut forwarded_by = Vec::new();
        for ranks in view.forwarded_by_all() {
            let end = forwarded_by.len() + row;
            forwarded_by.extend(words(ranks));
            forwarded_by.resize(end, HT_NONE);
        }
        let tables = [of_rank, words(&view.locals), forwarded_by, words(&view.rail_peers)];
        let tables = tables.each_ref().map(Vec::as_slice);
        let (_tables, [of_rank, local_ranks, forwarded_by, rail_peers]) = Buffer::of_tables(memory, tables)?;
        let own = view.own.index() * row * size_of::<u32>();
        Ok(Self {
            _tables,
            of_rank,
            local_ranks,
            forwarded: DevPtr(forwarded_by.0 + own),
            forwarded_by,
            rail_peers,
            side: SideStreams::new(memory)?,
        })
    }
}

fn words(ranks: &[GroupRank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.word()).collect()
}

impl Network {
    /// Connects the nodes for messages of up to `most_bytes`. Collective: either every rank gets a network, or every
    /// rank an error.
    pub fn open(
        bootstrap: &Bootstrap,
        (view, on_device): (&Arc<NodeView>, OnDevice),
        most_bytes: usize,
        group: &GroupContext,
        memory: &Arc<CudaMemory>,
        stream: Stream,
    ) -> Result<Self> {
        let failure = Arc::new(Failure {
            faults: Arc::clone(&group.faults),
            marks: FailureMarks::new(memory.clone(), group.failure_marks()),
        });
        let on_fault: Arc<dyn OnFault> = failure.clone();
        let wanted = Wanted {
            view,
            timeout: group.faults.timeout,
            most_blocks: NETWORK_BLOCKS as usize,
            most_bytes,
            on_fault,
            new_replay_marks: &|places| graph_marks::new_replay_marks(&memory.context, places),
        };
        Ok(Self {
            view: Arc::clone(view),
            on_device,
            // The marks' memory gets new owners, and without a network nothing else would forget the marks.
            exchanges: Exchanges::new(
                over_nccl(bootstrap, wanted, stream).inspect_err(|_| failure.marks.forget_all_but(0))?,
            ),
            failure,
        })
    }

    /// The position of this node's sums among those that are added for this rank's tokens; a kernel parameter.
    pub fn own_node_order(&self) -> u32 {
        self.view.topology.own_place(self.view.rank).map_or(OWN_NODE_FIRST, Node::word)
    }

    /// Ends the network because of `error`, found on the host, after which ranks no longer run the same operations.
    pub fn fail(&self, error: &Error) {
        match self.exchanges.transport() {
            Ok(transport) => transport.fail(error),
            Err(_) => self.failure.failed(error),
        }
    }

    /// Aborts the network's operations; to be called when nothing waits for their end any more.
    pub fn give_up(&self) {
        if let Ok(transport) = self.exchanges.transport() {
            transport.abort();
        }
    }

    /// Stops reporting failures to peers, whose windows may get new owners. To be called when no operation of this
    /// group runs any more.
    pub fn forget_peers(&self) {
        // The first is this rank's own.
        self.failure.marks.forget_all_but(1);
    }

    /// Closes the network. To be called when no operation follows and the peers' windows are released.
    pub fn close(&self) {
        self.failure.marks.forget_all_but(0);
        self.exchanges.end();
    }
}

/// What a network failure has to mark.
struct Failure {
    faults: Arc<FaultPage>,
    marks: FailureMarks,
}

impl OnFault for Failure {
    fn failed(&self, error: &Error) {
        self.faults.network_failed(error);
    }

    /// Marks the failure, which also ends waits on other ranks of this node.
    fn mark(&self) {
        if let Ok(_apart) = ApartFromCaptures::enter() {
            self.marks.write();
        }
    }

    fn has_failed(&self) -> bool {
        self.faults.first().is_some()
    }
}

/// The words that mark one group's failure.
pub struct FailureMarks {
    memory: Arc<dyn Memory>,
    /// The address of each word and its value. Locked during a write, as a word's memory may get a new owner once the
    /// word is forgotten.
    marks: Mutex<Vec<(DevPtr, u32)>>,
}

impl FailureMarks {
    /// Marks in device memory, to be written through `memory`.
    pub fn new(memory: Arc<dyn Memory>, marks: Vec<(DevPtr, u32)>) -> Self {
        Self { memory, marks: Mutex::new(marks) }
    }

    /// Writes the marks in order, except those that are forgotten meanwhile.
    pub fn write(&self) {
        let mut index = 0;
        while self.write_one(index) {
            index += 1;
        }
    }

    /// Forgets all but the first `kept` marks, which are then never written again. Waits for a write in progress, for
    /// as long as the device blocks it.
    pub fn forget_all_but(&self, kept: usize) {
        self.marks.lock().truncate(kept);
    }

    fn write_one(&self, index: usize) -> bool {
        let marks = self.marks.lock();
        let Some(&(at, word)) = marks.get(index) else { return false };
        // The error is ignored: a device that accepts no copy runs no kernel either.
        let _ = self.memory.upload(at, &word.to_le_bytes());
        true
    }
}

/// Streams of the library's own: one for work outside graphs, and up to [`MOST_CAPTURES`] for captures.
pub struct SideStreams {
    device: Arc<dyn Device>,
    outside: OwnStream,
    /// Streams for captures, each with its last one.
    inside: Mutex<Vec<(Capture, OwnStream)>>,
}

impl SideStreams {
    /// Creates the stream for work outside graphs; those for captures are created when needed.
    pub fn new(memory: &Arc<CudaMemory>) -> Result<Self> {
        let device: Arc<dyn Device> = memory.clone();
        Ok(Self { outside: OwnStream::new(Arc::clone(&device))?, inside: Mutex::default(), device })
    }

    /// The stream for work outside graphs.
    pub fn outside(&self) -> Stream {
        self.outside.stream
    }

    /// The side stream for a stream in this capture. The calling thread must be inside the context.
    pub fn of(&self, capture: Option<Capture>) -> Result<Stream> {
        let Some(capture) = capture else { return Ok(self.outside()) };
        let mut inside = self.inside.lock();
        if let Some((_, own)) = inside.iter().find(|(last, _)| *last == capture) {
            return Ok(own.stream);
        }
        for (last, free) in inside.iter_mut() {
            if !is_captured(free.stream)? {
                *last = capture;
                return Ok(free.stream);
            }
        }
        if inside.len() == MOST_CAPTURES {
            return Err(Error::usage(Subject::Stream, InSequence::CapturesInTurn { most: MOST_CAPTURES }));
        }
        let _apart = ApartFromCaptures::enter()?;
        let new = OwnStream::new(Arc::clone(&self.device))?;
        let stream = new.stream;
        inside.push((capture, new));
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::device::tests::TestDevice;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[test]
    fn some_multiprocessors_are_left() {
        assert_eq!(blocks_beside_network(132), 96);
        assert_eq!(blocks_beside_network(40), 20);
        assert_eq!(blocks_beside_network(1), 1);
    }

    fn marks(device: &TestDevice) -> FailureMarks {
        let words = vec![(DevPtr(0x100), 1), (DevPtr(0x200), 3), (DevPtr(0x300), 3)];
        FailureMarks::new(Arc::new(device.clone()), words)
    }

    #[test]
    fn all_that_are_not_forgotten_are_written() {
        let device = TestDevice::default();
        let marks = marks(&device);
        marks.forget_all_but(2);
        marks.write();
        assert_eq!(device.uploads(), [DevPtr(0x100), DevPtr(0x200)]);
    }

    #[test]
    fn memory_is_given_away_after_what_is_being_written() {
        let device = TestDevice::default();
        let marks = marks(&device);
        let has_forgotten = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let held = device.hold_up();
            scope.spawn(|| marks.write());
            device.wait_for_somebody();
            scope.spawn(|| {
                marks.forget_all_but(0);
                has_forgotten.store(true, Ordering::SeqCst);
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!has_forgotten.load(Ordering::SeqCst));
            drop(held);
        });
    }
}

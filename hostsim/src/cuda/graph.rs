//! What a capture becomes: pieces of work in lanes, with the order between them, and its replays.
//!
//! Each captured stream has a lane, and each lane of an executable graph a stream. So work of different lanes runs
//! concurrently in every replay, unless the capture ordered it.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;

use super::device;
use super::error::CudaError;
use super::queue::{Kind, Stream, Ticket};

/// Submits a piece of work to a stream, behind the given tickets; once in every replay.
pub(crate) type Submit = Box<dyn Fn(&Arc<Stream>, Vec<Ticket>) -> Result<Ticket, CudaError> + Send + Sync>;

/// Numbers of pieces of work.
pub(crate) type Nodes = BTreeSet<usize>;

/// One piece of work.
pub(crate) struct Node {
    pub(crate) lane: usize,
    /// All predecessors have smaller numbers.
    pub(crate) after: Nodes,
    pub(crate) submit: Submit,
}

/// Work in the order in which it was captured.
#[derive(Default)]
pub(crate) struct Graph {
    pub(crate) device: usize,
    pub(crate) lanes: usize,
    pub(crate) nodes: Vec<Node>,
    pub(crate) owned: Vec<Owned>,
}

/// Something that a graph owns; called when the graph and everything made from it are gone.
pub(crate) struct Owned(pub(crate) Box<dyn Fn() + Send + Sync>);

impl Drop for Owned {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Graph {
    /// Whether each piece of work is one of `ends` or comes before one.
    pub(crate) fn leads_to(&self, ends: &Nodes) -> bool {
        let mut reached = ends.clone();
        for (number, node) in self.nodes.iter().enumerate().rev() {
            if reached.contains(&number) {
                reached.extend(&node.after);
            }
        }
        reached.len() == self.nodes.len()
    }

    /// The pieces of work without successors.
    fn last(&self) -> Nodes {
        let mut last: Nodes = (0..self.nodes.len()).collect();
        for node in &self.nodes {
            last.retain(|number| !node.after.contains(number));
        }
        last
    }
}

/// A graph that can be launched. Its launches run one after the other, whatever their streams.
pub(crate) struct Executable {
    graph: Arc<Graph>,
    lanes: Vec<Arc<Stream>>,
    end: Mutex<Option<Ticket>>,
}

impl Executable {
    pub(crate) fn new(graph: Arc<Graph>) -> Result<Self, CudaError> {
        let device = device::device(graph.device)?;
        let lanes = (0..graph.lanes).map(|_| device.create_stream(Kind::NonBlocking));
        Ok(Self { lanes: lanes.collect::<Result<_, _>>()?, graph, end: Mutex::default() })
    }

    /// Submits all work behind that of `stream`; later work of `stream` runs after it.
    pub(crate) fn launch(&self, stream: &Arc<Stream>) -> Result<(), CudaError> {
        let mut end = self.end.lock();
        let begin = device::submit(stream, end.iter().cloned().collect(), Box::new(|| Ok(())))?;
        let mut tickets: Vec<Ticket> = Vec::new();
        for node in &self.graph.nodes {
            let after = if node.after.is_empty() { vec![begin.clone()] } else { pick(&tickets, &node.after) };
            let lane = self.lanes.get(node.lane).ok_or(CudaError::Unknown)?;
            tickets.push((node.submit)(lane, after)?);
        }
        let lanes = self.lanes.clone();
        let failure = move || lanes.iter().map(|lane| lane.take_error()).fold(Ok(()), Result::and);
        *end = Some(device::submit(stream, pick(&tickets, &self.graph.last()), Box::new(failure))?);
        Ok(())
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        self.lanes.iter().for_each(|lane| lane.close());
    }
}

fn pick(tickets: &[Ticket], nodes: &Nodes) -> Vec<Ticket> {
    nodes.iter().filter_map(|&node| tickets.get(node)).cloned().collect()
}

//! Unit tests of what a call of the transport does in the library itself, over an NCCL that only counts.
#![forbid(unsafe_code)]

use super::*;
use crate::allocations;
use crate::backend::nccl::own;
use crate::backend::transport::outstanding::tests::{CAPTURED, Device as Marked};
use crate::model::tensor::DevPtr;
use crate::model::topology::{NodeId, Topology};

const LABEL: Label = Label {
    what: "test",
    number: 0,
};
const MINUTE: Duration = Duration::from_secs(60);
/// More than are ever under way before a call looks for those that are over.
const CALLS: usize = 1000;

/// Nobody is told.
struct Nobody;

impl OnFault for Nobody {
    fn failed(&self, _error: &Error) {}
    fn mark(&self) {}
    fn has_failed(&self) -> bool {
        false
    }
}

/// Rank 2 of three, whose nodes are the letters.
fn transport(nodes: &str, device: &Marked) -> NcclTransport {
    let name = |name: char| NodeId::from_text(&name.to_string());
    let ids: Vec<NodeId> = nodes.chars().map(name).collect();
    let device = Device {
        number: 0,
        memory: Arc::new(device.clone()),
    };
    let members = Members::new(&Topology::from_ids(&ids), 2);
    let comm = own::tests::third_of_three(20 * CALLS);
    let comm = Untaken::new(comm, Arc::clone(&device.memory));
    NcclTransport::new(
        members,
        comm,
        device,
        Duration::from_secs(60),
        Arc::new(Nobody),
    )
    .unwrap()
}

/// Calls `CALLS` times; the operations run at once. Gives how often memory was allocated or freed.
fn call(transport: &NcclTransport, device: &Marked) -> usize {
    let message = |&peer: &usize| Message {
        peer,
        data: DevPtr(4096),
        bytes: 64,
    };
    let sends: Vec<_> = transport.gateways().iter().map(message).collect();
    let others = transport.sources().iter().filter(|&&peer| peer != 2);
    let receives: Vec<_> = others.map(message).collect();
    let before = allocations::so_far();
    for _ in 0..CALLS {
        let stream = Stream::DEFAULT;
        transport
            .exchange(LABEL, &sends, &receives, stream)
            .unwrap();
        device.pass(2);
    }
    allocations::so_far() - before
}

#[test]
fn calls_allocate_nothing_once_there_are_marks_enough() {
    for nodes in ["abc", "aab"] {
        let device = Marked::default();
        let transport = transport(nodes, &device);
        let at_first = call(&transport, &device);
        assert!(at_first > 0, "what is not counted cannot fail");
        assert_eq!(call(&transport, &device), 0, "{nodes}");
    }
}

/// Over `device`, with an operation in a graph.
fn captured(device: &Marked) -> NcclTransport {
    let transport = transport("abc", device);
    let message = Message {
        peer: 0,
        data: DevPtr(4096),
        bytes: 64,
    };
    let exchanged = transport.exchange(LABEL, &[message], &[], Stream(CAPTURED));
    exchanged.unwrap();
    transport
}

#[test]
fn a_communicator_that_a_graph_has_ends_with_a_transport_after_the_graph() {
    let device = Marked::default();
    let first = captured(&device);
    let comm = Arc::clone(&first.shared.comm);
    drop(first);
    assert!(!comm.wait_for_end(SHORT));
    device.destroy_graph();
    drop(transport("abc", &Marked::default()));
    assert!(comm.wait_for_end(MINUTE));
}

#[test]
fn a_communicator_whose_graphs_are_gone_ends_with_its_transport() {
    let device = Marked::default();
    let transport = captured(&device);
    let comm = Arc::clone(&transport.shared.comm);
    device.destroy_graph();
    drop(transport);
    assert!(comm.wait_for_end(Duration::ZERO));
}

//! Unit tests of a transport call's own work, over a fake NCCL that records calls.

use super::*;
use crate::allocations;
use crate::backend::device::tests::{CAPTURED, TestDevice};
use crate::backend::nccl::own;
use crate::backend::net::two_sided::members::tests::members;
use crate::backend::net::two_sided::spare::Offer;
use crate::backend::quiescence::Attempt;
use crate::model::tensor::DevPtr;
use std::sync::atomic::{AtomicBool, Ordering};

const LABEL: Label = Label { what: "test", number: 0 };
const MESSAGE: Message = Message { peer: GroupRank::new(0), data: DevPtr(4096), bytes: 64 };
/// More than are ever under way before a call collects ended ones.
const CALLS: usize = 1000;

/// A group that fails, and takes marks and news of failures, as a test says.
#[derive(Default)]
struct Group {
    has_failed: AtomicBool,
    /// Locked while the device takes no marks.
    held_up: Mutex<()>,
    is_being_told: AtomicBool,
    /// Locked while telling takes long.
    telling: Mutex<()>,
}

impl OnFault for Group {
    fn failed(&self, _error: &Error) {
        self.is_being_told.store(true, Ordering::SeqCst);
        drop(self.telling.lock());
    }
    fn mark(&self) {
        drop(self.held_up.lock());
    }
    fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }
}

/// Rank 2 of three; `nodes` has a letter per rank that names its node.
fn transport(nodes: &str, device: &TestDevice) -> NcclTransport {
    transport_of(Arc::new(Group::default()), nodes, device)
}

fn transport_of(group: Arc<Group>, nodes: &str, device: &TestDevice) -> NcclTransport {
    transport_over(own::tests::third_of_three(20 * CALLS), Duration::from_secs(60), group, nodes, device)
}

fn transport_over(
    comm: OwnCommunicator,
    timeout: Duration,
    group: Arc<Group>,
    nodes: &str,
    device: &TestDevice,
) -> NcclTransport {
    let outstanding = device.outstanding();
    let device: Arc<dyn Device> = Arc::new(device.clone());
    let members = members(nodes, 2);
    let comm = Untaken::new(Arc::new(comm), Arc::clone(&device));
    NcclTransport::new(members, comm, device, outstanding, timeout, group).unwrap()
}

/// Makes `CALLS` calls whose operations run at once; returns how often memory was allocated or freed.
fn call(transport: &NcclTransport, device: &TestDevice) -> usize {
    let message = |&peer: &GroupRank| Message { peer, ..MESSAGE };
    let view = &transport.shared.members.view;
    let sends: Vec<_> = view.rail_peers.iter().map(message).collect();
    let receives: Vec<_> = view.remote().iter().map(message).collect();
    let before = allocations::so_far();
    for _ in 0..CALLS {
        transport.exchange(LABEL, &sends, &receives, Stream::DEFAULT).unwrap();
        device.pass(2);
    }
    allocations::so_far() - before
}

#[test]
fn calls_allocate_nothing_once_there_are_marks_enough() {
    for nodes in ["abc", "aab"] {
        let device = TestDevice::default();
        let transport = transport(nodes, &device);
        assert!(call(&transport, &device) > 0, "what is not counted cannot fail");
        assert_eq!(call(&transport, &device), 0, "{nodes}");
    }
}

#[test]
fn the_communicator_is_kept_for_the_next_group() {
    let device = TestDevice::of_context(201);
    let comm = Arc::clone(&transport("abc", &device).shared.comm);
    let mut offer = Offer::new(&device, comm.place());
    assert!(Arc::ptr_eq(&offer.take(comm.tag).unwrap(), &comm));
}

#[test]
fn one_that_has_failed_is_not() {
    let device = TestDevice::of_context(202);
    let transport = transport("abc", &device);
    let comm = Arc::clone(&transport.shared.comm);
    transport.abort();
    drop(transport);
    assert!(Offer::new(&device, comm.place()).take(comm.tag).is_none());
}

fn wait_for(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn messages_without_bytes_are_none() {
    let device = TestDevice::of_context(208);
    let transport = transport("abc", &device);
    let none = Message { peer: GroupRank::new(1), bytes: 0, ..MESSAGE };
    transport.exchange(LABEL, &[none], &[none], Stream::DEFAULT).unwrap();
    assert_eq!(transport.shared.outstanding.recent(), None);
    transport.exchange(LABEL, &[MESSAGE], &[none], Stream::DEFAULT).unwrap();
    assert_eq!(transport.shared.outstanding.recent().unwrap().peers, [MESSAGE.peer]);
    device.pass(2);
}

/// The failure that the watchdog finds once `happen` has been called, and the communicator.
fn found(comm: OwnCommunicator, happen: fn(&Group, &TestDevice, &NcclTransport)) -> (String, Arc<OwnCommunicator>) {
    let (group, device) = (Arc::new(Group::default()), TestDevice::default());
    let transport = transport_over(comm, Duration::from_millis(50), Arc::clone(&group), "abc", &device);
    happen(&group, &device, &transport);
    let failing = &transport.shared.failing;
    wait_for(|| failing.fault().is_some());
    (failing.fault().unwrap().text().to_owned(), Arc::clone(&transport.shared.comm))
}

#[test]
fn the_watchdog_finds_what_ends_it() {
    let third = || own::tests::third_of_three(0);
    let (text, _) = found(third(), |group, _, _| group.has_failed.store(true, Ordering::SeqCst));
    assert!(text.ends_with("gave the network up"), "{text}");
    let (text, _) = found(own::tests::third_with_an_error(), |_, _, _| ());
    assert!(text.contains("before any network operation: an operation of NCCL"), "{text}");
    let (text, _) = found(third(), |_, device, transport| {
        transport.exchange(LABEL, &[MESSAGE], &[], Stream::DEFAULT).unwrap();
        device.pass(1);
    });
    assert!(text.starts_with("deadline passed: ") && text.ends_with("network operation 0, test 0"), "{text}");
    let (text, comm) = found(third(), |_, device, _| device.let_attempts_be(Attempt::Gone));
    assert_eq!(text, "it was reset");
    assert!(comm.exchange(&[], &[], Stream::DEFAULT).is_err(), "nothing is called on what is gone");
}

/// If they do not end in time, it is ended with them instead of being kept.
#[test]
fn its_end_waits_for_its_operations() {
    let device = TestDevice::of_context(207);
    let comm = own::tests::third_of_three(0);
    let transport = transport_over(comm, Duration::from_millis(300), Arc::default(), "abc", &device);
    transport.exchange(LABEL, &[MESSAGE], &[], Stream::DEFAULT).unwrap();
    let comm = Arc::clone(&transport.shared.comm);
    drop(transport);
    assert!(Offer::new(&device, comm.place()).take(comm.tag).is_none());
}

/// The watchdog looks only while somebody holds it.
#[test]
fn one_that_has_failed_ends_though_it_is_dropped_before_the_device_is_told() {
    let device = TestDevice::of_context(205);
    let group = Arc::new(Group::default());
    let held_up = group.held_up.lock();
    let transport = transport_of(Arc::clone(&group), "abc", &device);
    let comm = Arc::clone(&transport.shared.comm);
    let operations = Arc::downgrade(&transport.shared.outstanding);
    device.let_attempts_be(Attempt::Busy);
    Transport::fail(&transport, &Error::internal("lost"));
    drop(transport);
    wait_for(|| comm.exchange(&[], &[], Stream::DEFAULT).is_err());
    drop(held_up);
    // They count as under way until it is freed.
    assert!(operations.upgrade().is_some());
    device.let_attempts_be(Attempt::Done);
    wait_for(|| operations.upgrade().is_none());
}

#[test]
fn one_that_fails_ends_though_it_is_dropped_meanwhile() {
    let group = Arc::new(Group::default());
    let (held_up, telling) = (group.held_up.lock(), group.telling.lock());
    let transport = transport_of(Arc::clone(&group), "abc", &TestDevice::of_context(206));
    let (shared, comm) = (Arc::clone(&transport.shared), Arc::clone(&transport.shared.comm));
    let failing = std::thread::spawn(move || drop(shared.fail(Error::internal("lost"))));
    wait_for(|| group.is_being_told.load(Ordering::SeqCst));
    let dropping = std::thread::spawn(move || drop(transport));
    std::thread::sleep(Duration::from_millis(100));
    drop(telling);
    failing.join().unwrap();
    dropping.join().unwrap();
    wait_for(|| comm.exchange(&[], &[], Stream::DEFAULT).is_err());
    drop(held_up);
}

#[test]
fn a_late_look_of_the_watchdog_does_not_end_what_is_kept() {
    let device = TestDevice::of_context(204);
    let group = Arc::new(Group::default());
    let transport = transport_of(Arc::clone(&group), "abc", &device);
    let shared = Arc::clone(&transport.shared);
    group.has_failed.store(true, Ordering::SeqCst);
    drop(transport);
    shared.look(Instant::now());
    let comm = Offer::new(&device, shared.comm.place()).take(shared.comm.tag).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(comm.exchange(&[], &[], Stream::DEFAULT).is_ok());
}

#[test]
fn graphs_count_that_outlive_their_group() {
    let device = TestDevice::of_context(203);
    let transport = transport("abc", &device);
    transport.exchange(LABEL, &[MESSAGE], &[], Stream(CAPTURED)).unwrap();
    let comm = Arc::clone(&transport.shared.comm);
    drop(transport);
    assert!(comm.is_in_graphs());
    device.destroy_graph();
    assert!(!comm.is_in_graphs());
}

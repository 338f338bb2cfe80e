//! Unit tests of operations under way, on streams that advance when a test says so.

use super::*;
use crate::backend::detached::within;
use crate::backend::device::tests::{CAPTURED, TestDevice};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SECOND: Duration = Duration::from_secs(1);

fn label(number: u64) -> Label {
    Label { what: "test", number }
}

fn begin(outstanding: &Outstanding, device: &TestDevice, peers: &[usize], stream: Stream) -> Operation {
    let peers = peers.iter().copied().map(GroupRank::new);
    outstanding.begin(device, label(3), peers, stream).unwrap()
}

fn enqueue(outstanding: &Outstanding, device: &TestDevice, peers: &[usize]) -> u64 {
    let operation = begin(outstanding, device, peers, Stream::DEFAULT);
    outstanding.enqueued(operation, Stream::DEFAULT).unwrap();
    operation.number
}

#[test]
fn time_counts_for_the_first_since_it_runs() {
    let (device, outstanding) = (TestDevice::default(), Outstanding::default());
    let start = Instant::now();
    enqueue(&outstanding, &device, &[3, 1, 3]);
    enqueue(&outstanding, &device, &[2]);
    let late = |after: u32| outstanding.late(start + after * SECOND, SECOND).unwrap();
    // Its stream has not reached it.
    assert_eq!(late(1), None);
    assert_eq!(late(10), None);
    device.pass(1);
    assert_eq!(late(20), None);
    let first = late(22).unwrap();
    assert_eq!(first.operation.to_string(), "network operation 0, test 3");
    assert_eq!(first.peers, [3, 1].map(GroupRank::new));
    assert_eq!(first.waited, 2 * SECOND);
    // The second runs; its time counts from when that was seen.
    device.pass(2);
    assert_eq!(late(30), None);
    assert_eq!(late(31), None);
    assert_eq!(late(32).unwrap().operation.number, 1);
    let recent = |runs| {
        Some(Recent { operation: Operation { number: 1, label: label(3) }, peers: vec![GroupRank::new(2)], runs })
    };
    assert_eq!(outstanding.recent(), recent(true));
    device.pass(1);
    assert_eq!(late(100), None);
    assert_eq!(outstanding.recent(), recent(false));
    assert_eq!(outstanding.are_over(), Ok(true));
    // Marks are used again, times are not.
    enqueue(&outstanding, &device, &[1]);
    device.pass(1);
    assert_eq!(late(200), None);
}

#[test]
fn those_that_have_ended_are_passed_over_at_once() {
    let (device, outstanding) = (TestDevice::default(), Outstanding::default());
    for _ in 0..3 {
        enqueue(&outstanding, &device, &[1]);
    }
    device.pass(5);
    let start = Instant::now();
    assert_eq!(outstanding.late(start, SECOND), Ok(None));
    assert_eq!(outstanding.late(start + 2 * SECOND, SECOND).unwrap().unwrap().operation.number, 2);
}

#[test]
fn a_call_that_does_not_return_is_late_too() {
    let (device, outstanding) = (TestDevice::default(), Outstanding::default());
    begin(&outstanding, &device, &[1], Stream::DEFAULT);
    device.pass(1);
    let start = Instant::now();
    assert_eq!(outstanding.late(start, SECOND), Ok(None));
    assert!(outstanding.late(start + 2 * SECOND, SECOND).unwrap().is_some());
}

#[test]
fn what_the_host_waits_for_is_late_behind_what_has_not_run() {
    let (device, outstanding) = (TestDevice::default(), Outstanding::default());
    enqueue(&outstanding, &device, &[2]);
    let of = Label { what: "handle", number: 1 };
    let awaited = outstanding.begin(&device, of, [3, 1, 3].map(GroupRank::new).into_iter(), Stream::DEFAULT).unwrap();
    outstanding.enqueued(awaited, Stream::DEFAULT).unwrap();
    enqueue(&outstanding, &device, &[1]);
    let late = || outstanding.late_on_host(of, SECOND).unwrap();
    // No stream has reached any of them.
    assert_eq!(outstanding.late(Instant::now() + 9 * SECOND, SECOND), Ok(None));
    let first = late().unwrap();
    assert_eq!((first.operation, first.waited), (awaited, SECOND));
    assert_eq!(first.peers, [3, 1].map(GroupRank::new));
    assert_eq!(first.behind.map(|it| it.number), Some(0));
    device.pass(2);
    assert_eq!(late().unwrap().behind, None);
    device.pass(2);
    assert_eq!(late(), None);
}

#[test]
fn marks_are_used_again() {
    let (device, outstanding) = (TestDevice::default(), Outstanding::default());
    for number in 0..5 * MANY as u64 {
        assert_eq!(enqueue(&outstanding, &device, &[1]), number);
        device.pass(2);
    }
    assert_eq!(device.made.load(Ordering::Relaxed), 2 * MANY);
}

#[test]
fn what_was_withdrawn_or_captured_is_not_waited_for() {
    let device = TestDevice::default();
    let outstanding = device.outstanding();
    let withdrawn = begin(&outstanding, &device, &[3, 1, 3], Stream::DEFAULT);
    assert_eq!(outstanding.withdraw(withdrawn), [3, 1].map(GroupRank::new));
    assert_eq!(outstanding.are_over(), Ok(true));
    assert!(!outstanding.are_in_graphs());
    let captured = Stream(CAPTURED);
    enqueue(&outstanding, &device, &[1]);
    let withdrawn = begin(&outstanding, &device, &[2], captured);
    assert_eq!(outstanding.withdraw(withdrawn), [GroupRank::new(2)]);
    let operation = begin(&outstanding, &device, &[1], captured);
    outstanding.enqueued(operation, captured).unwrap();
    assert_eq!(outstanding.are_over(), Ok(false));
    device.pass(3);
    assert_eq!(outstanding.are_over(), Ok(true));
    assert!(outstanding.are_in_graphs());
    device.destroy_graph();
    assert!(!outstanding.are_in_graphs());
}

#[test]
fn a_device_is_quiescent_when_all_is_over() {
    let device = TestDevice::default();
    let outstanding = device.outstanding();
    let is_idle = |graphs| {
        let mut called = false;
        outstanding.while_idle(graphs, &mut || called = true);
        called
    };
    assert!(is_idle(Graphs::Count));
    enqueue(&outstanding, &device, &[1]);
    assert!(!is_idle(Graphs::DoNotCount));
    device.pass(2);
    assert!(is_idle(Graphs::Count));
    begin(&outstanding, &device, &[1], Stream(CAPTURED));
    assert!(!is_idle(Graphs::Count));
    assert!(is_idle(Graphs::DoNotCount));
    device.destroy_graph();
    assert!(is_idle(Graphs::Count));
    enqueue(&outstanding, &device, &[1]);
    assert!(!is_idle(Graphs::Count));
    device.break_marks(true);
    assert!(is_idle(Graphs::Count), "nothing runs there any more");
}

#[test]
fn one_whose_end_has_no_mark_is_not_over() {
    let (device, outstanding) = (TestDevice::default(), Outstanding::default());
    let operation = begin(&outstanding, &device, &[1], Stream::DEFAULT);
    device.break_marks(true);
    assert!(outstanding.enqueued(operation, Stream::DEFAULT).is_err());
    device.break_marks(false);
    device.pass(1);
    assert_eq!(outstanding.are_over(), Ok(false));
}

/// The result of `ask` while another thread enqueues an operation on a stream with `room` for marks.
fn beside_a_full_stream<T: Send + 'static>(room: usize, ask: impl FnOnce(&Outstanding) -> T + Send + 'static) -> T {
    let device = TestDevice::default();
    device.room.store(room, Ordering::Relaxed);
    let outstanding = Arc::new(device.outstanding());
    let is_full = device.hold_up();
    let caller = std::thread::spawn({
        let (outstanding, device) = (Arc::clone(&outstanding), device.clone());
        move || {
            enqueue(&outstanding, &device, &[1]);
        }
    });
    device.wait_for_somebody();
    let answer = within(60 * SECOND, move || ask(&outstanding)).unwrap();
    drop(is_full);
    caller.join().unwrap();
    answer.expect("the watchdog waits for who enqueues")
}

#[test]
fn replays_have_their_deadline_while_memory_is_freed() {
    let device = TestDevice::default();
    let outstanding = device.outstanding();
    begin(&outstanding, &device, &[1], Stream(CAPTURED));
    device.begin_replay();
    let start = Instant::now();
    let mut asked = false;
    outstanding.while_idle(Graphs::DoNotCount, &mut || {
        assert_eq!(outstanding.late(start, SECOND), Ok(None));
        let late = outstanding.late(start + 2 * SECOND, SECOND).unwrap();
        assert!(late.is_some_and(|late| late.is_replayed));
        assert!(outstanding.recent().is_some_and(|recent| recent.runs));
        asked = true;
    });
    assert!(asked);
}

#[test]
fn who_enqueues_on_a_full_stream_holds_up_nobody() {
    let late = |outstanding: &Outstanding| outstanding.late(Instant::now(), SECOND).map(|it| it.is_some());
    let are_over = |outstanding: &Outstanding| outstanding.are_over();
    let is_idle = |outstanding: &Outstanding| {
        let mut idle = false;
        outstanding.while_idle(Graphs::Count, &mut || idle = true);
        idle
    };
    for room in [0, 1] {
        assert_eq!(beside_a_full_stream(room, late), Ok(false));
        assert_eq!(beside_a_full_stream(room, are_over), Ok(false));
        assert!(!beside_a_full_stream(room, is_idle));
    }
}

//! Unit tests of operations under way, on streams that come along when a test says so.
#![forbid(unsafe_code)]

use super::*;
use crate::backend::ReplayMarks;
use crate::backend::detached::within;
use crate::backend::quiet::Attempt;
use crate::error::Error;
use crate::model::tensor::DevPtr;
use parking_lot::MutexGuard;
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// The number of the stream that is captured.
pub const CAPTURED: usize = 7;
const SECOND: Duration = Duration::from_secs(1);

/// A device with one stream, which has passed so many marks, and the marks that were made and recorded.
#[derive(Clone, Default)]
pub struct Device {
    passed: Arc<AtomicUsize>,
    recorded: Arc<AtomicUsize>,
    made: Arc<AtomicUsize>,
    /// Locked while the stream takes no more than so many marks, and no copy.
    full: Arc<Mutex<()>>,
    room: Arc<AtomicUsize>,
    is_waiting: Arc<AtomicBool>,
    uploads: Arc<Mutex<Vec<DevPtr>>>,
    /// What becomes of work for a quiet moment; by default it is done.
    attempt: Arc<Mutex<Option<Attempt>>>,
    /// Whether there is a graph with an operation.
    has_graph: Arc<AtomicBool>,
    is_replayed: Arc<AtomicBool>,
    context: u64,
}

impl Device {
    /// One in another context than all others.
    pub fn of_context(context: u64) -> Self {
        Self {
            context,
            ..Self::default()
        }
    }

    /// Makes a graph as if by a capture.
    pub fn make_graph(&self) {
        self.has_graph.store(true, Ordering::Relaxed);
    }

    /// All captured operations are under way from now on.
    pub fn begin_replay(&self) {
        self.is_replayed.store(true, Ordering::Relaxed);
    }

    /// Destroys the graph of all captured operations.
    pub fn destroy_graph(&self) {
        self.has_graph.store(false, Ordering::Relaxed);
    }

    /// Work for a quiet moment fares so from now on.
    pub fn let_attempts_be(&self, attempt: Attempt) {
        *self.attempt.lock() = Some(attempt);
    }

    /// Lets the stream pass so many more.
    pub fn pass(&self, marks: usize) {
        self.passed.fetch_add(marks, Ordering::Relaxed);
    }

    /// Until the result is dropped, copies wait, and marks for which there is no room.
    pub fn hold_up(&self) -> MutexGuard<'_, ()> {
        self.full.lock()
    }

    /// Returns once something waits for that.
    pub fn wait_for_somebody(&self) {
        while !self.is_waiting.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Where copies went, in their order.
    pub fn uploads(&self) -> Vec<DevPtr> {
        self.uploads.lock().clone()
    }
}

struct Mark {
    device: Device,
    place: usize,
}

impl StreamMark for Mark {
    fn record(&mut self, stream: Stream) -> Result<bool> {
        if stream.0 == CAPTURED {
            return Ok(false);
        }
        let device = &self.device;
        if device.recorded.load(Ordering::Relaxed) == device.room.load(Ordering::Relaxed) {
            device.is_waiting.store(true, Ordering::Relaxed);
            drop(device.full.lock());
        }
        self.place = self.device.recorded.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(true)
    }

    fn is_over(&self) -> Result<bool> {
        Ok(self.place <= self.device.passed.load(Ordering::Relaxed))
    }
}

impl ReplayMarks for Device {
    fn begin(&self, _place: usize, _stream: Stream) -> Result<()> {
        self.make_graph();
        Ok(())
    }
    fn end(&self, _place: usize, _stream: Stream) -> Result<()> {
        Ok(())
    }
    fn are_in_graphs(&self) -> bool {
        self.has_graph.load(Ordering::Relaxed)
    }
    fn began(&self, _place: usize) -> u64 {
        u64::from(self.is_replayed.load(Ordering::Relaxed))
    }
}

impl DeviceMemory for Device {
    fn new_replay_marks(&self, _places: usize) -> Result<Option<Arc<dyn ReplayMarks>>> {
        Ok(Some(Arc::new(self.clone())))
    }

    fn new_mark(&self) -> Result<Box<dyn StreamMark>> {
        self.made.fetch_add(1, Ordering::Relaxed);
        let device = self.clone();
        Ok(Box::new(Mark { device, place: 0 }))
    }

    fn context_number(&self) -> u64 {
        self.context
    }

    // Nothing else is asked for.
    fn alloc(&self, _bytes: usize) -> Result<DevPtr> {
        Err(Error::internal("no memory"))
    }
    fn free(&self, _data: DevPtr) -> Result<()> {
        Ok(())
    }
    fn alloc_own(&self, _bytes: usize) -> Result<DevPtr> {
        Ok(DevPtr(0x1000))
    }
    fn free_own(&self, _data: DevPtr, _bytes: usize) {}
    fn device_alias(&self, host: DevPtr) -> Result<DevPtr> {
        Ok(host)
    }
    fn upload(&self, to: DevPtr, _from: &[u8]) -> Result<()> {
        self.is_waiting.store(true, Ordering::Relaxed);
        drop(self.full.lock());
        self.uploads.lock().push(to);
        Ok(())
    }
    fn download(&self, _to: &mut [u8], _from: DevPtr) -> Result<()> {
        Ok(())
    }
    fn is_idle(&self, _stream: Stream) -> Result<bool> {
        Ok(true)
    }
    fn create_stream(&self) -> Result<Stream> {
        Ok(Stream::DEFAULT)
    }
    fn destroy_stream(&self, _stream: Stream) {}
    fn begin(&self) -> Box<dyn Any + Send> {
        Box::new(())
    }
    fn strand(&self, _mark: Box<dyn StreamMark>) {}
    fn watch_works(&self, _works: Weak<dyn Works>) {}
    fn attempt(&self, work: &mut dyn FnMut()) -> Attempt {
        let attempt = self.attempt.lock().unwrap_or(Attempt::Done);
        if attempt == Attempt::Done {
            work();
        }
        attempt
    }
    fn lost(&self) -> Option<Error> {
        (*self.attempt.lock() == Some(Attempt::Gone)).then(|| Error::internal("it was reset"))
    }
    fn enter(&self, _device: usize) -> Result<Box<dyn Any>> {
        Ok(Box::new(()))
    }
}

fn label(number: u64) -> Label {
    Label {
        what: "test",
        number,
    }
}

fn begin(outstanding: &Outstanding, device: &Device, peers: &[usize], stream: Stream) -> Operation {
    let peers = peers.iter().copied();
    outstanding.begin(device, label(3), peers, stream).unwrap()
}

fn enqueue(outstanding: &Outstanding, device: &Device, peers: &[usize]) -> u64 {
    let operation = begin(outstanding, device, peers, Stream::DEFAULT);
    outstanding.enqueued(operation, Stream::DEFAULT).unwrap();
    operation.number
}

#[test]
fn time_counts_for_the_first_since_it_runs() {
    let (device, outstanding) = (Device::default(), Outstanding::default());
    let start = Instant::now();
    enqueue(&outstanding, &device, &[3, 1, 3]);
    enqueue(&outstanding, &device, &[2]);
    let late = |after: u32| outstanding.late(start + after * SECOND, SECOND).unwrap();
    // Its stream has not come to it.
    assert_eq!(late(1), None);
    assert_eq!(late(10), None);
    device.pass(1);
    assert_eq!(late(20), None);
    let first = late(22).unwrap();
    assert_eq!(first.operation.to_string(), "network operation 0, test 3");
    assert_eq!(first.peers, [3, 1]);
    assert_eq!(first.waited, 2 * SECOND);
    // The second runs, and counts from when it was seen to.
    device.pass(2);
    assert_eq!(late(30), None);
    assert_eq!(late(31), None);
    assert_eq!(late(32).unwrap().operation.number, 1);
    let recent = |runs| {
        Some(Recent {
            operation: Operation {
                number: 1,
                label: label(3),
            },
            peers: vec![2],
            runs,
        })
    };
    assert_eq!(outstanding.recent(), recent(true));
    device.pass(1);
    assert_eq!(late(100), None);
    assert_eq!(outstanding.recent(), recent(false));
    assert_eq!(outstanding.are_over(), Ok(true));
}

#[test]
fn a_call_that_does_not_return_is_late_too() {
    let (device, outstanding) = (Device::default(), Outstanding::default());
    begin(&outstanding, &device, &[1], Stream::DEFAULT);
    device.pass(1);
    let start = Instant::now();
    assert_eq!(outstanding.late(start, SECOND), Ok(None));
    assert!(
        outstanding
            .late(start + 2 * SECOND, SECOND)
            .unwrap()
            .is_some()
    );
}

#[test]
fn what_the_host_waits_for_is_late_behind_what_has_not_run() {
    let (device, outstanding) = (Device::default(), Outstanding::default());
    enqueue(&outstanding, &device, &[2]);
    let of = Label {
        what: "handle",
        number: 1,
    };
    let awaited = outstanding
        .begin(&device, of, [3, 1, 3].into_iter(), Stream::DEFAULT)
        .unwrap();
    outstanding.enqueued(awaited, Stream::DEFAULT).unwrap();
    enqueue(&outstanding, &device, &[1]);
    let late = || outstanding.late_on_host(of, SECOND).unwrap();
    // No stream has come to any of them.
    assert_eq!(
        outstanding.late(Instant::now() + 9 * SECOND, SECOND),
        Ok(None)
    );
    let first = late().unwrap();
    assert_eq!((first.operation, first.waited), (awaited, SECOND));
    assert_eq!(first.peers, [3, 1]);
    assert_eq!(first.behind.map(|it| it.number), Some(0));
    device.pass(2);
    assert_eq!(late().unwrap().behind, None);
    device.pass(2);
    assert_eq!(late(), None);
}

#[test]
fn marks_are_used_again() {
    let (device, outstanding) = (Device::default(), Outstanding::default());
    for number in 0..5 * MANY as u64 {
        assert_eq!(enqueue(&outstanding, &device, &[1]), number);
        device.pass(2);
    }
    assert_eq!(device.made.load(Ordering::Relaxed), 2 * MANY);
}

#[test]
fn what_was_withdrawn_or_captured_is_not_waited_for() {
    let device = Device::default();
    let outstanding = Outstanding::new(&device).unwrap();
    outstanding.withdraw(begin(&outstanding, &device, &[1], Stream::DEFAULT));
    assert_eq!(outstanding.are_over(), Ok(true));
    assert!(!outstanding.are_in_graphs());
    let captured = Stream(CAPTURED);
    let operation = begin(&outstanding, &device, &[1], captured);
    outstanding.enqueued(operation, captured).unwrap();
    assert_eq!(outstanding.are_over(), Ok(true));
    assert!(outstanding.are_in_graphs());
    device.destroy_graph();
    assert!(!outstanding.are_in_graphs());
}

#[test]
fn a_device_is_quiet_when_all_is_over() {
    let device = Device::default();
    let outstanding = Outstanding::new(&device).unwrap();
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
}

/// What `ask` gives while another thread enqueues an operation on a stream with room for so many marks.
fn beside_a_full_stream<T: Send + 'static>(
    room: usize,
    ask: impl FnOnce(&Outstanding) -> T + Send + 'static,
) -> T {
    let device = Device::default();
    device.room.store(room, Ordering::Relaxed);
    let outstanding = Arc::new(Outstanding::new(&device).unwrap());
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
    let device = Device::default();
    let outstanding = Outstanding::new(&device).unwrap();
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
    let late = |outstanding: &Outstanding| {
        outstanding
            .late(Instant::now(), SECOND)
            .map(|it| it.is_some())
    };
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

//! A device for unit tests, whose stream advances when a test says so.

use super::*;
use crate::backend::net::two_sided::outstanding::Outstanding;
use crate::backend::net::two_sided::replays::ReplayMarks;
use crate::backend::quiescence::Quiescence;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// The number of the stream that is captured.
pub const CAPTURED: usize = 7;

/// A device with one stream that has passed so many marks, and all marks that were created and recorded.
#[derive(Clone, Default)]
pub struct TestDevice {
    passed: Arc<AtomicUsize>,
    recorded: Arc<AtomicUsize>,
    pub made: Arc<AtomicUsize>,
    /// Locked while the stream is full: it takes no copy, and no mark beyond `room`.
    full: Arc<Mutex<()>>,
    /// How many marks still fit on the full stream.
    pub room: Arc<AtomicUsize>,
    is_waiting: Arc<AtomicBool>,
    uploads: Arc<Mutex<Vec<DevPtr>>>,
    /// The outcome of work for a quiescent moment; by default it is done.
    attempt: Arc<Mutex<Option<Attempt>>>,
    /// Whether there is a graph with an operation.
    has_graph: Arc<AtomicBool>,
    is_replayed: Arc<AtomicBool>,
    are_broken: Arc<AtomicBool>,
    context: u64,
    enter: Option<fn() -> EnteredDevice>,
}

impl TestDevice {
    /// A device in another context than all others.
    pub fn of_context(context: u64) -> Self {
        Self { context, ..Self::default() }
    }

    /// A device that threads enter by `enter`.
    pub fn entered_by(enter: fn() -> EnteredDevice) -> Self {
        Self { enter: Some(enter), ..Self::default() }
    }

    /// No operations yet; captured ones will be in the device's graph.
    pub fn outstanding(&self) -> Outstanding {
        let new_marks = |_| -> Result<Option<Arc<dyn ReplayMarks>>> { Ok(Some(Arc::new(self.clone()))) };
        Outstanding::new(&new_marks).unwrap()
    }

    /// Makes a graph as if by a capture.
    pub fn make_graph(&self) {
        self.has_graph.store(true, Ordering::Relaxed);
    }

    /// From now on all captured operations are under way.
    pub fn begin_replay(&self) {
        self.is_replayed.store(true, Ordering::Relaxed);
    }

    /// Destroys the graph of all captured operations.
    pub fn destroy_graph(&self) {
        self.has_graph.store(false, Ordering::Relaxed);
    }

    /// Sets the outcome of work for a quiescent moment.
    pub fn let_attempts_be(&self, attempt: Attempt) {
        *self.attempt.lock() = Some(attempt);
    }

    /// Advances the stream by so many marks.
    pub fn pass(&self, marks: usize) {
        self.passed.fetch_add(marks, Ordering::Relaxed);
    }

    /// Fills the stream until the result is dropped: copies wait, and marks without room.
    pub fn hold_up(&self) -> MutexGuard<'_, ()> {
        self.full.lock()
    }

    /// Returns once a thread waits for room.
    pub fn wait_for_somebody(&self) {
        while !self.is_waiting.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Whether marks are in error from now on, as on a broken device.
    pub fn break_marks(&self, are_broken: bool) {
        self.are_broken.store(are_broken, Ordering::Relaxed);
    }

    fn check_marks(&self) -> Result<()> {
        if self.are_broken.load(Ordering::Relaxed) { Err(Error::internal("it is broken")) } else { Ok(()) }
    }

    /// The destinations of copies, in order.
    pub fn uploads(&self) -> Vec<DevPtr> {
        self.uploads.lock().clone()
    }
}

struct Mark {
    device: TestDevice,
    place: usize,
}

impl StreamMark for Mark {
    fn record(&mut self, stream: Stream) -> Result<bool> {
        if stream.0 == CAPTURED {
            return Ok(false);
        }
        let device = &self.device;
        device.check_marks()?;
        if device.recorded.load(Ordering::Relaxed) == device.room.load(Ordering::Relaxed) {
            device.is_waiting.store(true, Ordering::Relaxed);
            drop(device.full.lock());
        }
        self.place = self.device.recorded.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(true)
    }

    fn is_over(&self) -> Result<bool> {
        self.device.check_marks()?;
        Ok(self.place <= self.device.passed.load(Ordering::Relaxed))
    }
}

impl ReplayMarks for TestDevice {
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

impl Memory for TestDevice {
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
}

impl Device for TestDevice {
    fn new_mark(&self) -> Result<Box<dyn StreamMark>> {
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Mark { device: self.clone(), place: 0 }))
    }
    fn enter(&self) -> Result<EnteredDevice> {
        Ok((self.enter).map_or_else(|| EnteredDevice::new(()), |enter| enter()))
    }
    fn create_stream(&self) -> Result<Stream> {
        Ok(Stream::DEFAULT)
    }
    fn destroy_stream(&self, _stream: Stream) {}
    fn is_idle(&self, _stream: Stream) -> Result<bool> {
        Ok(true)
    }
    fn begin(&self) -> UnderWay {
        Arc::<Quiescence>::default().begin()
    }
    fn watch_works(&self, _works: Weak<dyn Works>) {}
    fn mark_hung(&self, _mark: Option<Box<dyn StreamMark>>) {}
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
    fn context_number(&self) -> u64 {
        self.context
    }
}

#[test]
fn patience_ends_at_the_limit_and_behind_a_hung_exchange_at_half_of_it() {
    let ends = |waited, is_hung| {
        let error = check_patience(Duration::from_millis(waited), Duration::from_millis(100), || is_hung).err();
        error.map(|it| it.text().to_owned())
    };
    assert_eq!((ends(50, true), ends(100, false)), (None, None));
    assert_eq!(ends(101, false).unwrap(), "its operations have not ended within 101 ms");
    assert!(ends(51, true).unwrap().contains("a lost rank never joined"));
}

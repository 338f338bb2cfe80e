//! Captures under way: which streams take part, what they have recorded, and what is forbidden meanwhile.
//!
//! Rules and errors are CUDA's. A call that breaks a rule also invalidates the capture.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;

use super::device;
use super::error::CudaError;
use super::graph::{Graph, Node, Nodes, Owned, Submit};
use super::queue::{Kind, Stream, Ticket};

/// The threads whose unsafe calls invalidate a capture; values of `cudaStreamCaptureMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

impl Mode {
    pub(crate) fn from_number(number: c_int) -> Result<Self, CudaError> {
        match number {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(CudaError::InvalidValue),
        }
    }
}

/// A point in the work of a capture, as an event marks it.
#[derive(Clone)]
pub(crate) struct Point {
    capture: u64,
    after: Nodes,
}

struct Capture {
    number: u64,
    mode: Mode,
    thread: ThreadId,
    origin: usize,
    /// By the address of their streams.
    lanes: BTreeMap<usize, Lane>,
    graph: Graph,
    is_valid: bool,
}

struct Lane {
    number: usize,
    /// The predecessors of the next piece of work.
    after: Nodes,
    /// Keeps the address in use.
    stream: Arc<Stream>,
}

static IS_ALLOWED: AtomicBool = AtomicBool::new(false);
static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());
/// Number of captures, so that calls need no lock while there are none.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static BEGUN: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// Allows captures from now on.
pub(crate) fn allow() {
    IS_ALLOWED.store(true, Ordering::Relaxed);
}

pub(crate) fn is_allowed() -> bool {
    IS_ALLOWED.load(Ordering::Relaxed)
}

/// Sets the calling thread's capture mode; returns the previous one.
pub(crate) fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

fn key(stream: &Arc<Stream>) -> usize {
    Arc::as_ptr(stream) as usize
}

/// Calls `then` with the stream's capture, if it has one.
fn with<T>(stream: &Arc<Stream>, then: impl FnOnce(&mut Capture) -> T) -> Option<T> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let mut captures = CAPTURES.lock();
    let own = |capture: &&mut Capture| capture.lanes.contains_key(&key(stream));
    captures.iter_mut().find(own).map(then)
}

impl Capture {
    fn invalidate(&mut self, error: CudaError) -> CudaError {
        self.is_valid = false;
        error
    }

    fn check(&self) -> Result<(), CudaError> {
        if self.is_valid { Ok(()) } else { Err(CudaError::StreamCaptureInvalidated) }
    }

    /// The lane of a stream, which joins the capture here if it has not yet.
    fn lane(&mut self, stream: &Arc<Stream>) -> &mut Lane {
        let number = self.lanes.len();
        self.lanes.entry(key(stream)).or_insert_with(|| Lane {
            number,
            after: Nodes::new(),
            stream: Arc::clone(stream),
        })
    }

    /// Whether work of `stream` would have to wait for work of this capture.
    fn holds_up(&self, stream: &Stream) -> bool {
        let is_blocking = |lane: &Lane| lane.stream.kind == Kind::Blocking;
        stream.kind == Kind::Legacy && self.graph.device == stream.device && self.lanes.values().any(is_blocking)
    }
}

/// The number of the stream's capture, and whether it is still valid.
pub(crate) fn status(stream: &Arc<Stream>) -> Option<(u64, bool)> {
    with(stream, |capture| (capture.number, capture.is_valid))
}

/// Begins a capture at `stream`.
pub(crate) fn begin(stream: &Arc<Stream>, mode: Mode) -> Result<(), CudaError> {
    if stream.kind == Kind::Legacy {
        return Err(CudaError::StreamCaptureUnsupported);
    }
    if status(stream).is_some() {
        return Err(CudaError::IllegalState);
    }
    let mut capture = Capture {
        number: BEGUN.fetch_add(1, Ordering::Relaxed) as u64 + 1,
        mode,
        thread: std::thread::current().id(),
        origin: key(stream),
        lanes: BTreeMap::new(),
        graph: Graph { device: stream.device, ..Graph::default() },
        is_valid: true,
    };
    capture.lane(stream);
    CAPTURES.lock().push(capture);
    COUNT.fetch_add(1, Ordering::Release);
    Ok(())
}

/// Ends the capture that began at `stream`.
pub(crate) fn end(stream: &Arc<Stream>) -> Result<Graph, CudaError> {
    let mut captures = CAPTURES.lock();
    let own = |capture: &Capture| capture.origin == key(stream);
    let Some(place) = captures.iter().position(own) else { return Err(CudaError::StreamCaptureUnmatched) };
    if let Some(capture) = captures.get(place)
        && capture.mode != Mode::Relaxed
        && capture.thread != std::thread::current().id()
    {
        return Err(CudaError::StreamCaptureWrongThread);
    }
    let mut capture = captures.remove(place);
    COUNT.fetch_sub(1, Ordering::Release);
    capture.check()?;
    let ends = capture.lane(stream).after.clone();
    if !capture.graph.leads_to(&ends) {
        return Err(CudaError::StreamCaptureUnjoined);
    }
    capture.graph.lanes = capture.lanes.len();
    Ok(capture.graph)
}

/// Hands something over to the graph that this capture becomes.
pub(crate) fn give(number: u64, owned: impl FnOnce() -> Owned) -> Result<(), CudaError> {
    let mut captures = CAPTURES.lock();
    let mut wanted = captures.iter_mut().filter(|capture| capture.number == number);
    wanted.next().ok_or(CudaError::InvalidValue)?.graph.owned.push(owned());
    Ok(())
}

/// Records a piece of work if the stream is captured; otherwise returns it.
pub(crate) fn record(stream: &Arc<Stream>, submit: Submit) -> Result<Option<Submit>, CudaError> {
    let mut submit = Some(submit);
    let recorded = with(stream, |capture| {
        capture.check()?;
        let number = capture.graph.nodes.len();
        let lane = capture.lane(stream);
        let node = Node {
            lane: lane.number,
            after: std::mem::replace(&mut lane.after, Nodes::from([number])),
            submit: submit.take().ok_or(CudaError::Unknown)?,
        };
        capture.graph.nodes.push(node);
        Ok(())
    });
    recorded.transpose()?;
    Ok(submit)
}

/// Enqueues work on a stream: now, which returns a ticket, or in every replay.
pub(crate) fn enqueue(
    stream: &Arc<Stream>,
    work: impl Fn() -> Result<(), CudaError> + Send + Sync + 'static,
) -> Result<Option<Ticket>, CudaError> {
    refuse_legacy(stream)?;
    let work = Arc::new(work);
    let submit = move |stream: &Arc<Stream>, after: Vec<Ticket>| {
        let work = Arc::clone(&work);
        device::submit(stream, after, Box::new(move || work()))
    };
    let submit = record(stream, Box::new(submit))?;
    submit.map(|submit| submit(stream, Vec::new())).transpose()
}

/// The present end of a captured stream's work; `None` for another stream.
pub(crate) fn mark(stream: &Arc<Stream>) -> Result<Option<Point>, CudaError> {
    with(stream, |capture| {
        capture.check()?;
        Ok(Point { capture: capture.number, after: capture.lane(stream).after.clone() })
    })
    .transpose()
}

/// Orders further work of `stream` after a point in a capture, which the stream thereby joins.
pub(crate) fn hold(stream: &Arc<Stream>, point: &Point) -> Result<(), CudaError> {
    let other = |capture: &mut Capture| match capture.number == point.capture {
        true => Ok(()),
        false => Err(capture.invalidate(CudaError::StreamCaptureMerge)),
    };
    with(stream, other).transpose()?;
    let mut captures = CAPTURES.lock();
    let own = |capture: &&mut Capture| capture.number == point.capture;
    let capture = captures.iter_mut().find(own).ok_or(CudaError::CapturedEvent)?;
    capture.check()?;
    if stream.kind == Kind::Legacy {
        return Err(capture.invalidate(CudaError::StreamCaptureImplicit));
    }
    capture.lane(stream).after.extend(&point.after);
    Ok(())
}

/// Refuses a call that is not allowed on a captured stream.
pub(crate) fn refuse(stream: &Arc<Stream>, error: CudaError) -> Result<(), CudaError> {
    with(stream, |capture| Err(capture.invalidate(error))).unwrap_or(Ok(()))
}

/// Refuses a query of an event that marks a point in a capture.
pub(crate) fn refuse_point(point: &Point) -> CudaError {
    let mut captures = CAPTURES.lock();
    let own = |capture: &&mut Capture| capture.number == point.capture;
    if let Some(capture) = captures.iter_mut().find(own) {
        capture.is_valid = false;
    }
    CudaError::CapturedEvent
}

/// Refuses a call that may wait for, or disturb, work being captured.
pub(crate) fn refuse_unsafe_call() -> Result<(), CudaError> {
    if MODE.get() == Mode::Relaxed {
        return Ok(());
    }
    let here = std::thread::current().id();
    let minds = |capture: &Capture| match capture.mode {
        Mode::Relaxed => false,
        Mode::ThreadLocal => capture.thread == here,
        Mode::Global => capture.thread == here || MODE.get() == Mode::Global,
    };
    refuse_all(CudaError::StreamCaptureUnsupported, minds)
}

/// Whether `stream` is the legacy default stream, and is ordered with a captured stream.
pub(crate) fn is_behind_a_capture(stream: &Stream) -> bool {
    COUNT.load(Ordering::Acquire) > 0 && CAPTURES.lock().iter().any(|it| it.holds_up(stream))
}

/// Refuses a call on the legacy default stream while it is ordered with a captured stream.
pub(crate) fn refuse_legacy(stream: &Stream) -> Result<(), CudaError> {
    refuse_all(CudaError::StreamCaptureImplicit, |it| it.holds_up(stream))
}

/// Refuses, in any mode, a call that synchronizes a device.
pub(crate) fn refuse_on_device(device: usize) -> Result<(), CudaError> {
    refuse_all(CudaError::StreamCaptureUnsupported, |it| it.graph.device == device)
}

fn refuse_all(error: CudaError, minds: impl Fn(&Capture) -> bool) -> Result<(), CudaError> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let mut captures = CAPTURES.lock();
    let mut result = Ok(());
    for capture in captures.iter_mut().filter(|capture| minds(capture)) {
        result = Err(capture.invalidate(error));
    }
    result
}

//! Events: marks in streams, with the time at which the stream passed them.
#![allow(unsafe_code)]

use std::ffi::{c_uint, c_void};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::Mutex;

use super::device;
use super::error::{CudaError, boundary, cudaError_t, store};
use super::queue::{Ticket, refuse_on_worker};
use super::recording::{self, Point};
use super::stream::{cudaStream_t, resolve};
use crate::handles::Handles;

pub type cudaEvent_t = *mut c_void;

const DISABLE_TIMING: c_uint = 2;
const KNOWN_FLAGS: c_uint = 7;

struct Event {
    device: usize,
    timed: bool,
    latest: Mutex<Option<Mark>>,
}

/// Where an event is.
#[derive(Clone)]
enum Mark {
    InStream(Record),
    InCapture(Point),
}

/// One `cudaEventRecord`. A later record replaces it for new waits; earlier waits keep it.
#[derive(Clone)]
struct Record {
    ticket: Ticket,
    passed: Arc<OnceLock<Instant>>,
}

static EVENTS: Handles<Event> = Handles::new(0x5200_0000_0000);

fn find(event: cudaEvent_t) -> Result<Arc<Event>, CudaError> {
    EVENTS.get(event as usize).ok_or(CudaError::InvalidResourceHandle)
}

/// An event's latest record, for a query; `None` if it was never recorded.
fn latest(event: cudaEvent_t) -> Result<Option<Record>, CudaError> {
    let mark = find(event)?.latest.lock().clone();
    match mark {
        None => Ok(None),
        Some(Mark::InStream(record)) => Ok(Some(record)),
        Some(Mark::InCapture(point)) => Err(recording::refuse_point(&point)),
    }
}

/// Invalidates all events of a device.
pub(crate) fn forget(index: usize) {
    EVENTS.remove_if(|event| event.device == index);
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventCreate(event: Option<&mut cudaEvent_t>) -> cudaError_t {
    boundary(|| create_into(event, 0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventCreateWithFlags(event: Option<&mut cudaEvent_t>, flags: c_uint) -> cudaError_t {
    boundary(|| create_into(event, flags))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventRecord(event: cudaEvent_t, stream: cudaStream_t) -> cudaError_t {
    boundary(|| {
        let event = find(event)?;
        let stream = resolve(stream)?;
        if let Some(point) = recording::mark(&stream)? {
            *event.latest.lock() = Some(Mark::InCapture(point));
            return Ok(());
        }
        let passed = Arc::new(OnceLock::new());
        let stamp = Arc::clone(&passed);
        let job = move || {
            stamp.get_or_init(Instant::now);
            Ok(())
        };
        let ticket = device::submit(&stream, Vec::new(), Box::new(job))?;
        *event.latest.lock() = Some(Mark::InStream(Record { ticket, passed }));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaStreamWaitEvent(stream: cudaStream_t, event: cudaEvent_t, flags: c_uint) -> cudaError_t {
    boundary(|| {
        if flags & !1 != 0 {
            return Err(CudaError::InvalidValue);
        }
        let stream = resolve(stream)?;
        let mark = find(event)?.latest.lock().clone();
        match mark {
            None => Ok(()),
            Some(Mark::InCapture(point)) => recording::hold(&stream, &point),
            Some(Mark::InStream(record)) => {
                recording::refuse(&stream, CudaError::StreamCaptureIsolation)?;
                device::submit(&stream, vec![record.ticket], Box::new(|| Ok(()))).map(|_| ())
            }
        }
    })
}

/// Waits for the event's latest record and reports a failure of its stream, if any.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventSynchronize(event: cudaEvent_t) -> cudaError_t {
    boundary(|| {
        refuse_on_worker()?;
        recording::refuse_unsafe_call()?;
        let Some(Record { ticket, .. }) = latest(event)? else { return Ok(()) };
        ticket.wait();
        ticket.stream.take_error()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventQuery(event: cudaEvent_t) -> cudaError_t {
    boundary(|| {
        recording::refuse_unsafe_call()?;
        match latest(event)? {
            Some(record) if !record.ticket.is_done() => Err(CudaError::NotReady),
            _ => Ok(()),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaEventElapsedTime(
    milliseconds: Option<&mut f32>,
    start: cudaEvent_t,
    end: cudaEvent_t,
) -> cudaError_t {
    boundary(|| {
        let start = passed(start)?;
        let end = passed(end)?;
        let elapsed = match end.checked_duration_since(start) {
            Some(forward) => forward.as_secs_f64(),
            None => -start.duration_since(end).as_secs_f64(),
        };
        store(milliseconds, (elapsed * 1e3) as f32)
    })
}

/// Destroys an event; waits for it that were already submitted still hold.
#[unsafe(no_mangle)]
pub extern "C" fn cudaEventDestroy(event: cudaEvent_t) -> cudaError_t {
    boundary(|| {
        device::device(find(event)?.device)?.take_turn()?;
        EVENTS.remove(event as usize).map(drop).ok_or(CudaError::InvalidResourceHandle)
    })
}

fn passed(event: cudaEvent_t) -> Result<Instant, CudaError> {
    let is_timed = find(event)?.timed;
    let record = latest(event)?.filter(|_| is_timed).ok_or(CudaError::InvalidResourceHandle)?;
    record.passed.get().copied().ok_or(CudaError::NotReady)
}

/// Creates an event on the current device and stores its handle.
fn create_into(out: Option<&mut cudaEvent_t>, flags: c_uint) -> Result<(), CudaError> {
    if out.is_none() || flags & !KNOWN_FLAGS != 0 {
        return Err(CudaError::InvalidValue);
    }
    let timed = flags & DISABLE_TIMING == 0;
    let index = device::current_index();
    device::device(index)?.take_turn()?;
    let event = Event { device: index, timed, latest: Mutex::new(None) };
    store(out, EVENTS.insert(Arc::new(event)) as cudaEvent_t)
}

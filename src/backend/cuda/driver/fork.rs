//! Work of one operation on two streams: the caller's, and one of our own.
//!
//! Each mark is waited for in the call that records it, or later in the same operation. So marks of an operation
//! in a graph have a meaning there, and none outlives its operation.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{check, functions, raw_stream};
use crate::backend::cuda::driver::context::Context;
use crate::error::Result;
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ptr::null_mut;
use std::sync::Arc;

/// A point of a stream's work that another stream waits for.
#[derive(Debug)]
pub struct Junction {
    context: Arc<Context>,
    raw: sys::CUevent,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Junction {}

impl Junction {
    /// One that marks nothing yet.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes one handle.
        check("cuEventCreate", unsafe {
            (functions()?.cuEventCreate)(&mut raw, flags)
        })?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
        })
    }

    /// Marks the present end of the work of `stream`. The calling thread is inside the context.
    pub fn record(&mut self, stream: Stream) -> Result<()> {
        // SAFETY: our event; the caller of the library vouches for its stream, the other one is ours.
        check("cuEventRecord", unsafe {
            (functions()?.cuEventRecord)(self.raw, raw_stream(stream))
        })
    }

    /// Makes `stream` wait for the marked work; if that is part of a graph, `stream` now is, too.
    pub fn hold(&self, stream: Stream) -> Result<()> {
        // SAFETY: as for recording.
        check("cuStreamWaitEvent", unsafe {
            (functions()?.cuStreamWaitEvent)(raw_stream(stream), self.raw, 0)
        })
    }

    /// Makes `to` wait for the present work of `from`.
    pub fn join(&mut self, from: Stream, to: Stream) -> Result<()> {
        self.record(from)?;
        self.hold(to)
    }
}

impl Drop for Junction {
    fn drop(&mut self) {
        // A context that is gone has destroyed its events.
        if let (Some(_entered), Ok(functions)) = (self.context.enter_if_alive(), functions()) {
            // SAFETY: made by `new`, destroyed once.
            unsafe { (functions.cuEventDestroy_v2)(self.raw) };
        }
    }
}

//! The order of a group's operations on the device, whatever their streams.
//!
//! Operations of a group use the same memory, and two of them at once might not fit on the device
//! together: so each begins after the one before, receive phases of staged ones aside. An event behind
//! every operation keeps the place, since by the time another stream comes the last one may be gone.
//! The host needs 0.1 to 0.4 us for it; blocks that counted themselves out would take longer on the device
//! (`docs/performance.md`).
#![forbid(unsafe_code)]

use crate::backend::cuda::context::Context;
use crate::backend::cuda::event::Event;
use crate::backend::cuda::streams::{Place, StreamId, id_of};
use crate::error::Result;
use crate::model::ops::Stream;
use parking_lot::Mutex;
use std::sync::Arc;

/// Where the last operation was enqueued, and where the last one of the graph that is being captured.
pub(super) struct Order {
    context: Arc<Context>,
    last: Mutex<Last>,
}

struct Last {
    outside: Option<StreamId>,
    inside: Option<StreamId>,
    done: Event,
}

impl Order {
    /// Nothing has been enqueued.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self {
            context: Arc::clone(context),
            last: Mutex::new(Last {
                outside: None,
                inside: None,
                done: Event::new(context)?,
            }),
        })
    }

    /// Whether `stream` is being captured into a graph.
    pub(super) fn is_capturing(&self, stream: Stream) -> Result<bool> {
        let _entered = self.context.enter()?;
        Ok(Place::of(stream)?.is_captured())
    }

    /// Enqueues an operation on `stream` by `launch`. Operations of one graph keep their order, too; the
    /// caller orders the graph's launches.
    pub(super) fn enqueue(
        &self,
        stream: Stream,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _entered = self.context.enter()?;
        let mut last = self.last.lock();
        let last = &mut *last;
        let at = Place::of(stream)?;
        let id = id_of(stream);
        let last_id = if at.is_captured() {
            &mut last.inside
        } else {
            &mut last.outside
        };
        // On one stream there is nothing to wait for, and no edge to add to a graph.
        if id.is_none() || *last_id != id {
            last.done.hold(at)?;
        }
        launch()?;
        *last_id = id;
        last.done.record(at)
    }
}

//! The order of a group's LL operations on the device, whatever their streams.
//!
//! On one stream it costs nothing but a count: an event behind every operation would take the host a
//! microsecond, and the last stream may be gone when another one comes. So the blocks of the kernels
//! count themselves when they end, and a stream that takes over waits for that number.
#![forbid(unsafe_code)]

use crate::backend::cuda::context::Context;
use crate::backend::cuda::memory::{Buffer, CudaMemory};
use crate::backend::cuda::streams::{StreamId, id_of, is_capturing, wait_for_number};
use crate::error::Result;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;

/// Which stream had the last whole operation or send phase.
pub(super) struct LlOrder {
    context: Arc<Context>,
    /// Blocks that have ended.
    ended: Buffer,
    last: Mutex<Last>,
}

#[derive(Default)]
struct Last {
    stream: Option<StreamId>,
    /// Blocks that were launched, modulo 2^32.
    launched: u32,
}

impl LlOrder {
    /// Nothing has been enqueued.
    pub(super) fn new(context: &Arc<Context>, memory: &Arc<CudaMemory>) -> Result<Self> {
        Ok(Self {
            context: Arc::clone(context),
            ended: Buffer::zeroed(memory, size_of::<u32>())?,
            last: Mutex::default(),
        })
    }

    /// Enqueues an operation on `stream` by `launch`, which is told where its blocks count themselves,
    /// and says how many there are. Where a graph is captured the caller orders the graph's launches.
    pub(super) fn enqueue(
        &self,
        stream: Stream,
        launch: impl FnOnce(DevPtr) -> Result<u32>,
    ) -> Result<()> {
        let _entered = self.context.enter()?;
        let mut last = self.last.lock();
        if is_capturing(stream)? {
            return launch(DevPtr::default()).map(drop);
        }
        let id = id_of(stream)?;
        if last.stream.is_some_and(|other| other != id) {
            wait_for_number(stream, self.ended.data(), last.launched)?;
        }
        let blocks = launch(self.ended.data())?;
        last.launched = last.launched.wrapping_add(blocks);
        last.stream = Some(id);
        Ok(())
    }
}

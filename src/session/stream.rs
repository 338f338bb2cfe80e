//! The library's own stream, for the exchanges of a group whose caller passes none.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::error::Result;
use crate::model::ops::Stream;
use std::sync::Arc;

/// Lives as long as its group.
pub(super) struct OwnStream {
    memory: Arc<dyn DeviceMemory>,
    stream: Stream,
}

impl OwnStream {
    /// A stream without implicit order.
    pub(super) fn new(memory: Arc<dyn DeviceMemory>) -> Result<Self> {
        let stream = memory.create_stream()?;
        Ok(Self { memory, stream })
    }

    /// The stream.
    pub(super) fn stream(&self) -> Stream {
        self.stream
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // An exchange that a lost rank never joined may block it for ever; then the stream is
        // leaked.
        if self.memory.is_idle(self.stream) == Ok(true) {
            self.memory.destroy_stream(self.stream);
        }
    }
}

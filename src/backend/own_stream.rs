//! A stream of the library's own: for the exchanges of a group whose caller passes none, and for what runs behind
//! callers' streams.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::error::Result;
use crate::model::ops::Stream;
use std::sync::Arc;

/// Destroyed when it is dropped.
pub struct OwnStream {
    memory: Arc<dyn DeviceMemory>,
    stream: Stream,
}

impl OwnStream {
    /// A stream without implicit order.
    pub fn new(memory: Arc<dyn DeviceMemory>) -> Result<Self> {
        let stream = memory.create_stream()?;
        Ok(Self { memory, stream })
    }

    /// The stream.
    pub fn stream(&self) -> Stream {
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

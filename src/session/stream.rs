//! A stream of the library's own, for exchanges of a group whose caller gives none.
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
    /// A stream that waits for no other.
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
        // An exchange that a lost rank never joined may be on it for ever; then the stream stays.
        if self.memory.is_idle(self.stream) == Ok(true) {
            self.memory.destroy_stream(self.stream);
        }
    }
}

//! A stream of the library's own: for the exchanges of a group whose caller passes none, and for what runs behind
//! callers' streams.

use crate::backend::device::Device;
use crate::error::Result;
use crate::model::ops::Stream;
use std::sync::Arc;

/// Destroyed when it is dropped.
pub struct OwnStream {
    device: Arc<dyn Device>,
    stream: Stream,
}

impl OwnStream {
    /// A stream without implicit order.
    pub fn new(device: Arc<dyn Device>) -> Result<Self> {
        let stream = device.create_stream()?;
        Ok(Self { device, stream })
    }

    pub fn stream(&self) -> Stream {
        self.stream
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // An exchange that a lost rank never joined may block it for ever; then the stream is leaked.
        if self.device.is_idle(self.stream) == Ok(true) {
            self.device.destroy_stream(self.stream);
        }
    }
}

//! What the library asks of the device that a group runs on.

use crate::backend::quiescence::{Attempt, UnderWay, Works};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::Duration;

pub trait Memory: Send + Sync {
    /// Allocates `bytes`; zero bytes may give NULL.
    fn alloc(&self, bytes: usize) -> Result<DevPtr>;
    /// Frees the result of [`Memory::alloc`], at once or at the device's next quiescent moment; NULL is fine.
    fn free(&self, data: DevPtr) -> Result<()>;
    /// Memory for the library's own use; may reuse memory that another group gave back.
    fn alloc_own(&self, bytes: usize) -> Result<DevPtr>;
    /// Gives back the result of [`Memory::alloc_own`]; no operation uses it any more.
    fn free_own(&self, data: DevPtr, bytes: usize);
    /// The address by which the device reaches mapped host memory.
    fn device_alias(&self, host: DevPtr) -> Result<DevPtr>;
    /// Copies `from` to the device and waits for the copy.
    fn upload(&self, to: DevPtr, from: &[u8]) -> Result<()>;
    /// Copies from the device into `to` and waits for the copy.
    fn download(&self, to: &mut [u8], from: DevPtr) -> Result<()>;
}

/// Gives the blocks of a group's handles, instead of the library's memory.
pub trait Blocks: Send + Sync {
    /// `bytes` of the device, which are the group's until it is closed.
    fn take(&self, bytes: usize) -> Result<DevPtr>;
}

pub trait Marks: Send + Sync {
    /// A mark that is nowhere yet.
    fn new_mark(&self) -> Result<Box<dyn StreamMark>>;
}

/// A place in what streams have been given.
pub trait StreamMark: Send {
    /// Marks what `stream` has been given so far. False, and no mark, while the stream is captured.
    fn record(&mut self, stream: Stream) -> Result<bool>;
    /// Whether what was marked has run; also if it has ended in an error.
    fn is_over(&self) -> Result<bool>;
}

/// Ends a wait for a group's last operations. They have a deadline of their own once they run; so twice the `timeout` is
/// for what is before them on their stream, and once if that may be an exchange which `is_hung`.
pub fn check_patience(waited: Duration, timeout: Duration, is_hung: impl FnOnce() -> bool) -> Result<()> {
    let text = if waited > timeout && is_hung() {
        "its operations are behind an exchange that a lost rank never joined".to_owned()
    } else if waited > 2 * timeout {
        format!("its operations have not ended within {} ms", waited.as_millis())
    } else {
        return Ok(());
    };
    Err(Error::new(Code::RemoteError, text))
}

/// Whether what is before `mark` may still be on the device.
pub fn may_run(mark: &Option<Box<dyn StreamMark>>) -> bool {
    mark.as_ref().is_none_or(|mark| mark.is_over() == Ok(false))
}

/// A device as this process uses it: its streams, what waits on it for other ranks, and captures into graphs. A device
/// without graphs has no captures.
pub trait Device: Memory + Marks {
    /// Makes it the calling thread's until the result is dropped. What the thread calls meanwhile disturbs no capture
    /// of another one.
    fn enter(&self) -> Result<EnteredDevice>;
    /// A stream that is not ordered with any other, not even with the legacy default one.
    fn create_stream(&self) -> Result<Stream>;
    fn destroy_stream(&self, stream: Stream);
    /// Whether everything enqueued on `stream` has run.
    fn is_idle(&self, stream: Stream) -> Result<bool>;
    /// Announces work that waits for other ranks. Until the result is dropped, no call waits for the whole device.
    fn begin(&self) -> UnderWay;
    /// Counts `works` among what waits for other ranks.
    fn watch_works(&self, works: Weak<dyn Works>);
    /// Reports an exchange that was given up and may never end; `mark`, if there is any, is behind it. Freeing
    /// memory would wait for it, so everything stays allocated until it has ended.
    fn mark_hung(&self, mark: Option<Box<dyn StreamMark>>);
    /// Does `work`, which may wait for the whole device, if the device is quiescent and no graph has operations.
    fn attempt(&self, work: &mut dyn FnMut()) -> Attempt;
    /// The failure of a device that was reset: nothing on it is left, and nothing can be freed there. `None` for any
    /// other.
    fn lost(&self) -> Option<Error> {
        None
    }
    /// What tuning files call it.
    fn name(&self) -> Result<String> {
        Ok("CPU".to_owned())
    }
    /// Its SMs; `None` where no kernel runs.
    fn multiprocessors(&self) -> Option<u32> {
        None
    }
    /// What tells the context from all others that the process has or had; zero on a device without contexts.
    fn context_number(&self) -> u64 {
        0
    }
    /// Whether work on `stream` would go into a graph, or have to wait for a stream whose work does.
    fn is_captured(&self, _stream: Stream) -> Result<bool> {
        Ok(false)
    }
    /// Does `work` so that captures which this thread has open go on, even if it makes calls that end them otherwise.
    fn apart_from_captures(&self, work: &mut dyn FnMut()) -> Result<()> {
        work();
        Ok(())
    }
}

/// A device is the calling thread's until this is dropped, on that thread.
#[must_use]
pub struct EnteredDevice {
    _leaves: Box<dyn Any>,
}

impl EnteredDevice {
    /// The device is left when `leaves` is dropped.
    pub fn new(leaves: impl Any) -> Self {
        let _leaves = Box::new(leaves);
        Self { _leaves }
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
pub mod tests;

/// Destroyed when it is dropped.
pub struct OwnStream {
    device: Arc<dyn Device>,
    pub stream: Stream,
}

impl OwnStream {
    /// A stream without implicit order.
    pub fn new(device: Arc<dyn Device>) -> Result<Self> {
        let stream = device.create_stream()?;
        Ok(Self { device, stream })
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

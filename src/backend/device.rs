//! What the library needs from the device that a group runs on.

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

/// Supplies the blocks of a group's handles, in place of the library's memory.
pub trait Blocks: Send + Sync {
    /// `bytes` of device memory, the group's until it is closed.
    fn take(&self, bytes: usize) -> Result<DevPtr>;
}

/// A position in the work of a stream.
pub trait StreamMark: Send {
    /// Marks the work enqueued on `stream` so far. Returns false, without a mark, while the stream is captured.
    fn record(&mut self, stream: Stream) -> Result<bool>;
    /// Whether the marked work has ended, successfully or not.
    fn is_over(&self) -> Result<bool>;
}

/// Limits the wait for a group's last operations to `limit`, and to half of it if the work ahead of them on their
/// stream may be an exchange that `is_hung`. They have their own deadline once they run, so `limit` is twice that.
pub fn check_patience(waited: Duration, limit: Duration, is_hung: impl FnOnce() -> bool) -> Result<()> {
    let text = if waited > limit / 2 && is_hung() {
        "its operations are behind an exchange that a lost rank never joined".to_owned()
    } else if waited > limit {
        format!("its operations have not ended within {} ms", waited.as_millis())
    } else {
        return Ok(());
    };
    Err(Error::new(Code::RemoteError, text))
}

/// Whether work before `mark` may still be on the device.
pub fn may_run(mark: &Option<Box<dyn StreamMark>>) -> bool {
    mark.as_ref().is_none_or(|mark| mark.is_over() == Ok(false))
}

/// A device as this process uses it: its streams, its work that waits for other ranks, and captures into graphs. A
/// device without graphs has no captures.
pub trait Device: Memory {
    /// Makes it current on the calling thread until the result is dropped. Meanwhile no call of the thread disturbs a
    /// capture of another thread.
    fn enter(&self) -> Result<EnteredDevice>;
    /// A stream that is not ordered with any other, including the legacy default stream.
    fn create_stream(&self) -> Result<Stream>;
    fn destroy_stream(&self, stream: Stream);
    /// A mark that is not recorded yet.
    fn new_mark(&self) -> Result<Box<dyn StreamMark>>;
    /// Whether everything enqueued on `stream` has run.
    fn is_idle(&self, stream: Stream) -> Result<bool>;
    /// Announces work that waits for other ranks. Until the result is dropped, no call synchronizes the device.
    fn begin(&self) -> UnderWay;
    /// Counts `works` as work that waits for other ranks.
    fn watch_works(&self, works: Weak<dyn Works>);
    /// Reports an exchange that was given up and may never end; `mark`, if any, is recorded behind it. Freeing memory
    /// would wait for it, so everything stays allocated until it has ended.
    fn mark_hung(&self, mark: Option<Box<dyn StreamMark>>);
    /// Does `work`, which may synchronize the device, if the device is quiescent and no graph has operations.
    fn attempt(&self, work: &mut dyn FnMut()) -> Attempt;
    /// The failure of a device that was reset: nothing is left on it, and nothing can be freed there. `None` otherwise.
    fn lost(&self) -> Option<Error> {
        None
    }
    /// Its name in tuning files.
    fn name(&self) -> Result<String> {
        Ok("CPU".to_owned())
    }
    /// Its SMs; `None` where no kernel runs.
    fn multiprocessors(&self) -> Option<u32> {
        None
    }
    /// Distinguishes the context from all others that the process has or had; 0 on a device without contexts.
    fn context_number(&self) -> u64 {
        0
    }
    /// Whether work on `stream` would be captured, or would have to wait for a captured stream.
    fn is_captured(&self, _stream: Stream) -> Result<bool> {
        Ok(false)
    }
    /// Does `work` so that this thread's open captures survive calls that would invalidate them.
    fn apart_from_captures(&self, work: &mut dyn FnMut()) -> Result<()> {
        work();
        Ok(())
    }
}

/// Keeps a device current on the calling thread; must be dropped there.
#[must_use]
pub struct EnteredDevice {
    _leaves: Box<dyn Any>,
}

impl EnteredDevice {
    /// The device that is left when `leaves` is dropped.
    pub fn new(leaves: impl Any) -> Self {
        let _leaves = Box::new(leaves);
        Self { _leaves }
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
pub mod tests;

/// A stream that is destroyed on drop.
pub struct OwnStream {
    device: Arc<dyn Device>,
    pub stream: Stream,
}

impl OwnStream {
    /// A stream that is not implicitly ordered with others.
    pub fn new(device: Arc<dyn Device>) -> Result<Self> {
        let stream = device.create_stream()?;
        Ok(Self { device, stream })
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // An exchange that a lost rank never joined may block it forever; then the stream is leaked.
        if self.device.is_idle(self.stream) == Ok(true) {
            self.device.destroy_stream(self.stream);
        }
    }
}

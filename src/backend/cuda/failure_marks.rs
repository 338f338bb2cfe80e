//! Words on the device that tell kernels of a failure that none of them has seen.

use crate::backend::device::Memory;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;

/// The words of one group.
pub struct FailureMarks {
    memory: Arc<dyn Memory>,
    /// Where each is, and what it says after a failure. Locked while one is written: who forgets it gives its memory to
    /// others.
    marks: Mutex<Vec<(DevPtr, u32)>>,
}

impl FailureMarks {
    /// `marks` in device memory that `memory` reaches.
    pub fn new(memory: Arc<dyn Memory>, marks: Vec<(DevPtr, u32)>) -> Self {
        Self { memory, marks: Mutex::new(marks) }
    }

    /// Writes them in their order, but for those that are forgotten meanwhile.
    pub fn write(&self) {
        let mut index = 0;
        while self.write_one(index) {
            index += 1;
        }
    }

    /// Forgets all but the first `kept`: none of the others is written from now on. Waits for the one that is being
    /// written, as long as the device holds that up.
    pub fn forget_all_but(&self, kept: usize) {
        self.marks.lock().truncate(kept);
    }

    fn write_one(&self, index: usize) -> bool {
        let marks = self.marks.lock();
        let Some(&(at, word)) = marks.get(index) else { return false };
        // A device that takes no copy runs no kernel either.
        let _ = self.memory.upload(at, &word.to_le_bytes());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::device::tests::TestDevice;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    fn marks(device: &TestDevice) -> FailureMarks {
        let words = vec![(DevPtr(0x100), 1), (DevPtr(0x200), 3), (DevPtr(0x300), 3)];
        FailureMarks::new(Arc::new(device.clone()), words)
    }

    #[test]
    fn all_that_are_not_forgotten_are_written() {
        let device = TestDevice::default();
        let marks = marks(&device);
        marks.forget_all_but(2);
        marks.write();
        assert_eq!(device.uploads(), [DevPtr(0x100), DevPtr(0x200)]);
    }

    #[test]
    fn memory_is_given_away_after_what_is_being_written() {
        let device = TestDevice::default();
        let marks = marks(&device);
        let has_forgotten = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let held = device.hold_up();
            scope.spawn(|| marks.write());
            device.wait_for_somebody();
            scope.spawn(|| {
                marks.forget_all_but(0);
                has_forgotten.store(true, Ordering::SeqCst);
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!has_forgotten.load(Ordering::SeqCst));
            drop(held);
        });
    }
}

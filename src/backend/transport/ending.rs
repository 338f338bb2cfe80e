//! The end of a transport's communicator, at a quiet moment of the device: NCCL frees memory there, which waits for all
//! that runs on the device and holds up every launch meanwhile.
//!
//! A communicator that a graph has, or whose ranks on this node end it later, ends inside NCCL at a moment of NCCL's.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::detached;
use crate::backend::nccl::own::OwnCommunicator;
use crate::backend::quiet::Attempt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the end of a group waits for a quiet moment: other groups may always have operations under way.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long nothing of this library may begin on the device while NCCL frees memory.
const MOST_AT_REST: Duration = Duration::from_millis(250);
const PAUSE: Duration = Duration::from_millis(1);
const LONG_PAUSE: Duration = Duration::from_millis(20);

/// Destroys `comm`, whose operations are over. Returns when that is done, after `limit`, or when no moment was quiet
/// for a while; then a thread waits for one.
pub fn end(comm: Arc<OwnCommunicator>, memory: Arc<dyn DeviceMemory>, limit: Duration) {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        match attempt(&comm, &*memory) {
            Attempt::Busy => std::thread::sleep(PAUSE),
            Attempt::Gone => return,
            Attempt::Done => {
                comm.wait_for_end(limit);
                return;
            }
        }
    }
    let later = move || {
        while attempt(&comm, &*memory) == Attempt::Busy {
            std::thread::sleep(LONG_PAUSE);
        }
    };
    drop(detached::start(later));
}

/// Begins the end if the device is quiet.
fn attempt(comm: &Arc<OwnCommunicator>, memory: &dyn DeviceMemory) -> Attempt {
    let attempt = memory.attempt(&mut || {
        let own = Arc::clone(comm);
        match detached::start(move || own.destroy()) {
            Ok(()) => drop(comm.wait_for_end(MOST_AT_REST)),
            Err(_) => comm.destroy(),
        }
    });
    if attempt == Attempt::Gone {
        comm.abandon();
    }
    attempt
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::nccl::own::tests::third_of_three;
    use crate::backend::transport::flights::tests::Device;

    const MINUTE: Duration = Duration::from_secs(60);

    /// A communicator whose group has ended on a device where work for quiet moments fares so.
    fn ended(attempt: Attempt) -> (Arc<OwnCommunicator>, Device) {
        let (comm, device) = (Arc::new(third_of_three(0)), Device::default());
        device.let_attempts_be(attempt);
        end(Arc::clone(&comm), Arc::new(device.clone()), MINUTE);
        (comm, device)
    }

    #[test]
    fn it_ends_at_once_on_a_quiet_device() {
        assert!(ended(Attempt::Done).0.wait_for_end(Duration::ZERO));
    }

    #[test]
    fn it_ends_at_a_quiet_moment_after_its_group() {
        let (comm, device) = ended(Attempt::Busy);
        assert!(!comm.wait_for_end(3 * LONG_PAUSE));
        device.let_attempts_be(Attempt::Done);
        assert!(comm.wait_for_end(MINUTE));
    }

    #[test]
    fn it_is_left_alone_on_a_device_that_was_reset() {
        let (comm, device) = ended(Attempt::Gone);
        device.let_attempts_be(Attempt::Done);
        comm.destroy();
        comm.abort();
        assert!(!comm.wait_for_end(Duration::ZERO));
    }
}

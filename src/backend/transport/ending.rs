//! The end of a transport's communicator, at a quiet moment of the device: NCCL frees memory there, which waits for all
//! that runs on the device and holds up every launch meanwhile. The operations of one that has failed end before that.
//!
//! A communicator that a graph has, or whose ranks on this node end it later, ends inside NCCL at a moment of NCCL's.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::detached;
use crate::backend::nccl::own::OwnCommunicator;
use crate::backend::quiet::Attempt;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long the end of a group waits for a quiet moment: other groups may always have operations under way.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long nothing of this library may begin on the device while NCCL frees memory, which takes 50 to 500 ms. NCCL may
/// first wait for other ranks of the node, which may need this one: that must end.
const MOST_AT_REST: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);
const LONG_PAUSE: Duration = Duration::from_millis(20);
/// How long NCCL's threads may take to see that a communicator is aborted; until then, freeing it takes as long.
const SEEN: Duration = Duration::from_secs(1);

/// Destroys `comm`, whose operations are over. Returns when that is done, after `limit`, or when no moment was quiet
/// for a while; then a thread waits for one.
pub fn end(comm: Arc<OwnCommunicator>, memory: Arc<dyn DeviceMemory>, limit: Duration) {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        match attempt(&comm, &*memory, limit) {
            Attempt::Busy => std::thread::sleep(PAUSE),
            Attempt::Gone => return,
            Attempt::Done => {
                comm.wait_for_end(limit);
                return;
            }
        }
    }
    let later = move || {
        while attempt(&comm, &*memory, limit) == Attempt::Busy {
            std::thread::sleep(LONG_PAUSE);
        }
    };
    drop(detached::start(later));
}

/// Ends the operations of `comm` at once, wherever they are. Frees it at a quiet moment, and waits until then.
pub fn abort(comm: &Arc<OwnCommunicator>, memory: &dyn DeviceMemory) {
    let (go, wait) = channel();
    let own = Arc::clone(comm);
    if detached::start(move || own.abort(|| wait.recv().is_ok())).is_err() {
        return comm.abort(|| true);
    }
    std::thread::sleep(SEEN);
    let mut free = || {
        // Nobody listens if it has ended otherwise.
        let _ = go.send(());
        comm.wait_for_end(MOST_AT_REST);
    };
    while memory.attempt(&mut free) == Attempt::Busy {
        std::thread::sleep(LONG_PAUSE);
    }
}

/// Begins the end if the device is quiet, and leaves it so until the end or for `limit`.
fn attempt(comm: &Arc<OwnCommunicator>, memory: &dyn DeviceMemory, limit: Duration) -> Attempt {
    let attempt = memory.attempt(&mut || {
        let own = Arc::clone(comm);
        match detached::start(move || own.destroy()) {
            Ok(()) => drop(comm.wait_for_end(limit.min(MOST_AT_REST))),
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
    use crate::model::ops::Stream;

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
        comm.abort(|| true);
        assert!(!comm.wait_for_end(Duration::ZERO));
    }

    #[test]
    fn an_aborted_one_is_freed_at_a_quiet_moment() {
        let (comm, device) = (Arc::new(third_of_three(0)), Device::default());
        device.let_attempts_be(Attempt::Busy);
        std::thread::scope(|scope| {
            scope.spawn(|| abort(&comm, &device));
            assert!(!comm.wait_for_end(SEEN + 3 * LONG_PAUSE));
            assert!(comm.exchange(&[], &[], Stream::DEFAULT).is_err());
            device.let_attempts_be(Attempt::Done);
        });
        assert!(comm.wait_for_end(MINUTE));
    }

    #[test]
    fn an_aborted_one_is_left_alone_on_a_device_that_was_reset() {
        let (comm, device) = (Arc::new(third_of_three(0)), Device::default());
        device.let_attempts_be(Attempt::Gone);
        abort(&comm, &device);
        assert!(!comm.wait_for_end(LONG_PAUSE));
    }
}

//! The end of a transport's communicator, at a quiet moment of the device: NCCL frees memory there, which waits for all
//! that runs on the device and holds up every launch meanwhile. So the device is kept quiet until NCCL has done so. The
//! operations of a communicator that has failed end before that.
//!
//! A communicator that a graph has ends later: NCCL would wait for the graph, and then free memory at whatever moment.
//! It is kept until a transport begins or ends after the graph is gone, in a call that may wait for the device; one that
//! has failed, until a quiet moment after the graph. One whose ranks on this node end it later ends inside NCCL at a
//! moment of NCCL's.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::detached;
use crate::backend::nccl::own::OwnCommunicator;
use crate::backend::quiet::Attempt;
use crate::backend::transport::replays::InGraphs;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long the end of a group waits for a quiet moment: other groups may always have operations under way.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long the device is kept quiet while NCCL frees memory, which takes 50 to 500 ms. There is a limit because NCCL may
/// wait for other ranks of the node first, and they may wait for this one in another group.
const MOST_AT_REST: Duration = Duration::from_secs(5);
/// How long a call may take to destroy communicators that graphs had: the ranks of a node may not agree on when these
/// were gone, and NCCL may wait for all of them.
pub const AFTER_GRAPHS: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(1);
const LONG_PAUSE: Duration = Duration::from_millis(20);
/// After how long NCCL's threads have noticed an abort. Until then, freeing the communicator takes as long.
const NOTICED_AFTER: Duration = Duration::from_secs(1);

/// Communicators whose transports have ended before graphs that have them.
static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

struct Kept {
    comm: Arc<OwnCommunicator>,
    memory: Arc<dyn DeviceMemory>,
    in_graphs: InGraphs,
}

/// A communicator that no transport has taken yet. If none does, it ends.
pub struct Untaken {
    comm: Arc<OwnCommunicator>,
    memory: Arc<dyn DeviceMemory>,
    is_taken: bool,
}

impl Untaken {
    /// `comm`, on the device that has `memory`.
    pub fn new(comm: OwnCommunicator, memory: Arc<dyn DeviceMemory>) -> Self {
        Self {
            comm: Arc::new(comm),
            memory,
            is_taken: false,
        }
    }

    /// The communicator, to be ended by the caller.
    pub fn take(mut self) -> Arc<OwnCommunicator> {
        self.is_taken = true;
        Arc::clone(&self.comm)
    }
}

impl Drop for Untaken {
    fn drop(&mut self) {
        if !self.is_taken {
            let (comm, memory) = (Arc::clone(&self.comm), Arc::clone(&self.memory));
            drop(detached::start(move || {
                let never: InGraphs = Box::new(|| false);
                abort(&comm, &*memory, &never, MOST_AT_REST);
            }));
        }
    }
}

/// Destroys `comm`, whose operations are over. Returns when that is done, after `limit`, or when no moment was quiet
/// for a while; then a thread waits for one.
pub fn end(comm: Arc<OwnCommunicator>, memory: Arc<dyn DeviceMemory>, limit: Duration) {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        match attempt(&comm, &*memory, limit) {
            Attempt::Busy => std::thread::sleep(PAUSE),
            Attempt::Gone => return,
            Attempt::Done => {
                comm.wait_for_end(limit.saturating_sub(start.elapsed()));
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

/// Keeps `comm`, of which graphs have operations, until [`end_kept`] finds them gone.
pub fn keep(comm: Arc<OwnCommunicator>, memory: Arc<dyn DeviceMemory>, in_graphs: InGraphs) {
    let kept = Kept {
        comm,
        memory,
        in_graphs,
    };
    KEPT.lock().push(kept);
}

/// Destroys the communicators that were kept for graphs which are gone, as many as it can within [`AFTER_GRAPHS`].
pub fn end_kept() {
    let start = Instant::now();
    let is_free = |kept: &mut Kept| !(kept.in_graphs)();
    while let Some(left) = AFTER_GRAPHS.checked_sub(start.elapsed()) {
        let free = KEPT.lock().extract_if(.., is_free).next();
        let Some(Kept { comm, memory, .. }) = free else {
            break;
        };
        end(comm, memory, left);
    }
}

/// Ends the operations of `comm` at once, wherever they are. Frees it at a quiet moment, when no graph has any of them,
/// and waits for that, for ever if need be. Nobody shall wait for other ranks longer than `limit`.
pub fn abort(
    comm: &Arc<OwnCommunicator>,
    memory: &dyn DeviceMemory,
    in_graphs: &InGraphs,
    limit: Duration,
) {
    let (go, wait) = channel();
    let own = Arc::clone(comm);
    if detached::start(move || own.abort(|| wait.recv().is_ok())).is_err() {
        return comm.abort(|| true);
    }
    std::thread::sleep(NOTICED_AFTER);
    let mut free = || {
        // Nobody listens if it has ended otherwise.
        if go.send(()).is_ok() {
            comm.wait_for_end(at_rest(limit));
        }
    };
    while in_graphs() || memory.attempt(&mut free) == Attempt::Busy {
        std::thread::sleep(LONG_PAUSE);
    }
}

/// Begins the end if the device is quiet, and keeps it so until the end.
fn attempt(comm: &Arc<OwnCommunicator>, memory: &dyn DeviceMemory, limit: Duration) -> Attempt {
    let attempt = memory.attempt(&mut || {
        let own = Arc::clone(comm);
        match detached::start(move || own.destroy()) {
            Ok(()) => drop(comm.wait_for_end(at_rest(limit))),
            Err(_) => comm.destroy(),
        }
    });
    if attempt == Attempt::Gone {
        comm.abandon();
    }
    attempt
}

/// For how long the device is kept quiet at most, where a wait for other ranks may take `limit`: theirs for this one
/// must not take as long because of it.
fn at_rest(limit: Duration) -> Duration {
    MOST_AT_REST.min(limit / 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ReplayMarks;
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

    fn has_graph(device: &Device) -> InGraphs {
        let device = device.clone();
        Box::new(move || device.are_in_graphs())
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
    fn one_that_a_graph_has_ends_after_the_graph() {
        let (comm, device) = (Arc::new(third_of_three(0)), Device::default());
        device.make_graph();
        keep(
            Arc::clone(&comm),
            Arc::new(device.clone()),
            has_graph(&device),
        );
        end_kept();
        assert!(!comm.wait_for_end(3 * LONG_PAUSE));
        device.destroy_graph();
        end_kept();
        assert!(comm.wait_for_end(MINUTE));
    }

    #[test]
    fn an_aborted_one_is_freed_at_a_quiet_moment() {
        let (comm, device) = (Arc::new(third_of_three(0)), Device::default());
        device.let_attempts_be(Attempt::Busy);
        std::thread::scope(|scope| {
            scope.spawn(|| abort(&comm, &device, &has_graph(&device), MINUTE));
            assert!(!comm.wait_for_end(NOTICED_AFTER + 3 * LONG_PAUSE));
            assert!(comm.exchange(&[], &[], Stream::DEFAULT).is_err());
            device.make_graph();
            device.let_attempts_be(Attempt::Done);
            assert!(!comm.wait_for_end(3 * LONG_PAUSE));
            device.destroy_graph();
        });
        assert!(comm.wait_for_end(MINUTE));
    }

    #[test]
    fn one_that_nobody_takes_ends() {
        let untaken = |device: &Device| Untaken::new(third_of_three(0), Arc::new(device.clone()));
        let device = Device::default();
        let dropped = untaken(&device);
        let comm = Arc::clone(&dropped.comm);
        drop(dropped);
        assert!(comm.wait_for_end(MINUTE));
        let taken = untaken(&device).take();
        assert!(!taken.wait_for_end(NOTICED_AFTER + 3 * LONG_PAUSE));
    }

    #[test]
    fn an_aborted_one_is_left_alone_on_a_device_that_was_reset() {
        let (comm, device) = (Arc::new(third_of_three(0)), Device::default());
        device.let_attempts_be(Attempt::Gone);
        abort(&comm, &device, &has_graph(&device), MINUTE);
        assert!(!comm.wait_for_end(LONG_PAUSE));
    }
}

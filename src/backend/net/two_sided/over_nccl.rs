//! [`Transport`] over NCCL's host API, on a communicator of the library's own.

use crate::backend::detached;
use crate::backend::device::Device;
use crate::backend::nccl::own::{OwnCommunicator, Part};
use crate::backend::net::OnFault;
use crate::backend::net::two_sided::ending::{Ending, Untaken};
use crate::backend::net::two_sided::failing::Failing;
use crate::backend::net::two_sided::members::Members;
use crate::backend::net::two_sided::outstanding::Outstanding;
use crate::backend::net::two_sided::watchdog::watch;
use crate::backend::net::two_sided::{Label, Late, Message, Operation, Recent, Transport, spare, warm_up};
use crate::error::{Code, Error, Result};
use crate::model::ids::GroupRank;
use crate::model::ops::Stream;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A rank's side of a transport.
pub struct NcclTransport {
    shared: Arc<Shared>,
    /// `None` in the copy for the warm-up thread.
    _end: Option<End>,
}

/// Ends a transport when it is dropped.
struct End(Arc<Shared>);

/// Messages of the operation being enqueued; kept to reuse their memory.
#[derive(Default)]
struct Parts {
    sends: Vec<Part>,
    receives: Vec<Part>,
}

/// The state that the watchdog and detached threads also hold.
struct Shared {
    members: Members,
    comm: Arc<OwnCommunicator>,
    device: Arc<dyn Device>,
    outstanding: Arc<Outstanding>,
    /// Locked by the thread that enqueues.
    turn: Mutex<Parts>,
    timeout: Duration,
    failing: Arc<Failing>,
}

impl NcclTransport {
    /// A transport over `comm`, whose ranks are the `members`.
    pub fn new(
        members: Members,
        comm: Untaken,
        device: Arc<dyn Device>,
        outstanding: Outstanding,
        timeout: Duration,
        on_fault: Arc<dyn OnFault>,
    ) -> Result<Self> {
        let outstanding = Arc::new(outstanding);
        let works: Weak<Outstanding> = Arc::downgrade(&outstanding);
        device.watch_works(works);
        let comm = comm.take();
        comm.serve(outstanding.in_graphs());
        let shared = Arc::new(Shared {
            members,
            comm,
            device,
            outstanding,
            turn: Mutex::default(),
            timeout,
            failing: Arc::new(Failing::new(on_fault, timeout)),
        });
        // Without a watchdog it must end at once, not together with other ranks.
        watch(&shared, Shared::look).inspect_err(|_| shared.give_up())?;
        let _end = Some(End(Arc::clone(&shared)));
        Ok(Self { shared, _end })
    }

    /// Exchanges the first messages, which connect the ranks for messages of up to `most_bytes`, within `limit`.
    pub fn warm_up(&self, most_bytes: usize, limit: Duration, stream: Stream) -> Result<()> {
        let shared = &self.shared;
        let transport = Self { shared: Arc::clone(shared), _end: None };
        // This call makes NCCL connect the ranks, and wait for them without a deadline.
        let warmed = detached::within(limit, move || {
            let Shared { device, members, .. } = &*transport.shared;
            let _entered = device.enter()?;
            warm_up::run(&transport, (&**device, stream), members, most_bytes, limit)
        });
        let error = match warmed {
            Ok(Some(Ok(true))) => return Ok(()),
            Ok(Some(Err(error))) | Err(error) => error,
            Ok(Some(Ok(false)) | None) => shared.late_warm_up(limit),
        };
        Err(shared.fail(error))
    }
}

impl Shared {
    /// Enqueues `call` as one operation with `peers`.
    fn operate(
        &self,
        label: Label,
        peers: impl Iterator<Item = GroupRank>,
        stream: Stream,
        call: impl Fn(&OwnCommunicator) -> Result<()>,
    ) -> Result<()> {
        let Self { outstanding, device, .. } = self;
        let operation = outstanding.begin(&**device, label, peers, stream)?;
        let mut called = Ok(());
        // In such a call NCCL queries its events, which would invalidate an open capture.
        let apart = device.apart_from_captures(&mut || called = call(&self.comm));
        apart.and(called).and_then(|()| outstanding.enqueued(operation, stream)).map_err(|error| {
            let peers = self.members.names(&outstanding.withdraw(operation));
            let own = self.members.own_name();
            // Peers may have part of the operation enqueued: a common order cannot be restored.
            self.fail(error.within(format!("{own}, {operation} with {peers}")))
        })
    }

    fn check_usable(&self) -> Result<()> {
        self.failing.fault().map_or(Ok(()), |fault| Err(fault.clone()))
    }

    fn late_warm_up(&self, waited: Duration) -> Error {
        let running = self.outstanding.recent().filter(|recent| recent.runs);
        let (operation, peers) = match running {
            Some(recent) => (recent.operation, recent.peers),
            None => (Operation::WARM_UP, self.members.ranks.clone()),
        };
        self.too_late(&Late { operation, peers, waited, is_replayed: false, is_shared: false, behind: None })
    }

    /// Ends the transport with `error`, unless it has ended before; returns the failure that counts.
    fn fail(&self, error: Error) -> Error {
        self.failing.fail(error.clone(), self.aborting());
        self.failing.fault().cloned().unwrap_or(error)
    }

    /// Ends what is on the streams; until then it counts as under way. What cannot be ended stays, with its memory.
    fn aborting(&self) -> Ending {
        self.ending().of(Arc::clone(&self.outstanding))
    }

    fn ending(&self) -> Ending {
        Ending::new(Arc::clone(&self.comm), Arc::clone(&self.device))
    }

    fn give_up(&self) {
        let text = format!("{} gave the network up", self.members.own_name());
        self.failing.give_up(Error::new(Code::RemoteError, text), self.aborting());
    }

    fn health(&self) -> Option<Error> {
        if self.failing.fault().is_none()
            && let Some(error) = self.comm.asynchronous_error()
        {
            self.fail(self.reported(error));
        }
        self.failing.fault().cloned()
    }

    fn too_late(&self, late: &Late) -> Error {
        let mut text = format!(
            "deadline passed: {} waited {} ms for {} in {}",
            self.members.own_name(),
            late.waited.as_millis(),
            self.members.names(&late.peers),
            late.operation,
        );
        if late.is_replayed {
            text += ", replayed by a graph";
        }
        if late.is_shared {
            text += " (or in an earlier one of its graphs, which are too many to tell)";
        }
        if let Some(first) = late.behind {
            text += &format!(", behind {first}");
        }
        Error::new(Code::RemoteError, text)
    }

    /// An NCCL error, with the operation in progress.
    fn reported(&self, error: Error) -> Error {
        let own = self.members.own_name();
        let context = match self.outstanding.recent() {
            Some(Recent { operation, peers, runs }) => {
                let when = if runs { "" } else { "after " };
                let names = self.members.names(&peers);
                format!("{own}, {when}{operation} with {names}")
            }
            None => format!("{own}, before any network operation"),
        };
        error.within(context)
    }

    /// The device was reset: nothing on it can be ended.
    fn lose(&self, error: Error) {
        self.comm.abandon();
        self.failing.close(error.clone());
        self.failing.group.failed(&error);
    }

    /// Called by the watchdog.
    fn look(&self, now: Instant) {
        if self.failing.fault().is_some() {
            return self.failing.look();
        }
        if let Some(error) = self.device.lost() {
            return self.lose(error);
        }
        if self.failing.group.has_failed() {
            // Other nodes wait for this rank, and this rank's streams for them.
            return self.give_up();
        }
        let error = match self.outstanding.late(now, self.timeout) {
            Ok(late) => late.map(|late| self.too_late(&late)),
            Err(error) => Some(self.reported(error)),
        };
        let error = error.or_else(|| Some(self.reported(self.comm.asynchronous_error()?)));
        if let Some(error) = error {
            // It may be the driver's error about marks on a device that was reset meanwhile.
            if let Some(lost) = self.device.lost() {
                return self.lose(lost);
            }
            self.fail(error);
        }
    }
}

impl Transport for NcclTransport {
    fn exchange(&self, label: Label, sends: &[Message], receives: &[Message], stream: Stream) -> Result<()> {
        self.shared.check_usable()?;
        let members = &self.shared.members;
        let mut turn = self.shared.turn.lock();
        let Parts { sends: to, receives: from } = &mut *turn;
        parts(members, sends.iter().copied(), to)?;
        parts(members, receives.iter().copied(), from)?;
        if to.is_empty() && from.is_empty() {
            return Ok(());
        }
        let messages = sends.iter().chain(receives).filter(|it| it.bytes > 0);
        self.shared.operate(label, messages.map(|it| it.peer), stream, |comm| comm.exchange(to, from, stream))
    }

    fn end_late(&self, label: Label, waited: Duration) -> Option<Error> {
        let shared = &self.shared;
        let error = match shared.outstanding.late_on_host(label, waited) {
            Ok(late) => shared.too_late(&late?),
            Err(error) => shared.reported(error),
        };
        Some(shared.fail(error))
    }

    fn health(&self) -> Option<Error> {
        self.shared.health()
    }

    fn abort(&self) {
        self.shared.give_up();
    }

    fn fail(&self, error: &Error) {
        self.shared.fail(error.clone());
    }
}

/// Converts messages with bytes to the communicator's form, into `kept`.
fn parts(members: &Members, messages: impl Iterator<Item = Message>, kept: &mut Vec<Part>) -> Result<()> {
    kept.clear();
    for message in messages.filter(|message| message.bytes > 0) {
        kept.push(Part { peer: members.comm_rank(message.peer)?, data: message.data, bytes: message.bytes });
    }
    Ok(())
}

impl Drop for End {
    fn drop(&mut self) {
        let shared = &self.0;
        let start = Instant::now();
        let mut pause = Duration::from_micros(20);
        // The watchdog ends waits for other ranks; this limit is for a stream that does not reach its operations.
        while shared.failing.fault().is_none() && shared.outstanding.are_over() == Ok(false) {
            if start.elapsed() > shared.timeout {
                shared.give_up();
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        // A failed communicator is ended elsewhere. Setting the fault keeps the watchdog, which may look once more,
        // from finding a failure of the group and ending a communicator that the next group has by then.
        if shared.failing.close(Error::internal("the network's group has ended")) {
            return spare::keep(shared.ending());
        }
        // The watchdog ends it, if the device cannot be told; it looks only while this holds the transport.
        while shared.failing.has_to_end() {
            std::thread::sleep(pause);
        }
    }
}

#[cfg(test)]
#[path = "over_nccl_tests.rs"]
mod tests;

//! Enqueues operations on streams.
//!
//! Operations of one communicator run one after the other even on different streams, because they share the
//! communicator's slots; NCCL orders them likewise.

use std::sync::Arc;

use super::collective::Collective;
use super::comm::Comm;
use super::error::{Code, Failure, Outcome};
use super::transfer::{self, Transfer};
use crate::cuda::device;
use crate::cuda::error::CudaError;
use crate::cuda::queue::{Stream, Ticket};
use crate::cuda::recording;

type Operation = Arc<dyn Fn(&Comm) -> Outcome<()> + Send + Sync>;

/// The sends and receives of one group on one communicator.
pub(crate) struct Bundle {
    pub(crate) comm: Arc<Comm>,
    streams: Vec<Arc<Stream>>,
    transfers: Vec<Transfer>,
}

impl Bundle {
    pub(crate) fn new(comm: Arc<Comm>, stream: Arc<Stream>, transfer: Transfer) -> Self {
        Self { comm, streams: vec![stream], transfers: vec![transfer] }
    }

    pub(crate) fn add(&mut self, stream: Arc<Stream>, transfer: Transfer) {
        if !self.streams.iter().any(|known| Arc::ptr_eq(known, &stream)) {
            self.streams.push(stream);
        }
        self.transfers.push(transfer);
    }

    /// Submits the bundle as one operation, ordered on all its streams.
    pub(crate) fn launch(self) -> Outcome<()> {
        let transfers = self.transfers;
        submit(&self.comm, &self.streams, move |comm| transfer::run(comm, &transfers))
    }
}

/// Submits a collective.
pub(crate) fn collective(comm: &Arc<Comm>, stream: &Arc<Stream>, collective: Collective) -> Outcome<()> {
    submit(comm, std::slice::from_ref(stream), move |comm| collective.run(comm))
}

fn submit(
    comm: &Arc<Comm>,
    streams: &[Arc<Stream>],
    operation: impl Fn(&Comm) -> Outcome<()> + Send + Sync + 'static,
) -> Outcome<()> {
    comm.health()?;
    comm.connect()?;
    let Some((first, others)) = streams.split_first() else { return Ok(()) };
    let owner = Arc::clone(comm);
    let operation: Operation = Arc::new(operation);
    let submit = move |stream: &Arc<Stream>, after| in_turn(&owner, stream, after, &operation);
    if streams.iter().any(|stream| recording::status(stream).is_some()) {
        if !others.is_empty() {
            return Err(Failure::new(Code::InvalidUsage, "operations of a group are captured on one stream only"));
        }
        let kept = Arc::clone(&comm.graphs);
        // In every replay it takes its turn among those of its communicator anew.
        let submit = move |stream: &Arc<Stream>, after| {
            let _ = &kept;
            submit(stream, after)
        };
        recording::record(first, Box::new(submit))?;
        return Ok(());
    }
    // NCCL queries its own events here and ignores the error, but a capture that forbids the query is invalidated.
    let _ = recording::refuse_unsafe_call();
    let ticket = submit(first, others.iter().filter_map(Stream::pending).collect())?;
    for other in others {
        device::submit(other, vec![ticket.clone()], Box::new(|| Ok(())))?;
    }
    Ok(())
}

/// Submits an operation of a communicator, ordered after the previous one.
fn in_turn(
    comm: &Arc<Comm>,
    stream: &Arc<Stream>,
    mut after: Vec<Ticket>,
    operation: &Operation,
) -> Result<Ticket, CudaError> {
    // Not under the lock, which an aborting thread needs to end what the device waits for.
    let device = device::device(stream.device)?;
    device.take_turn()?;
    let mut last = comm.last.lock();
    after.extend(last.clone());
    let (owner, operation) = (Arc::clone(comm), Arc::clone(operation));
    let job = move || owner.execute(|comm| operation(comm));
    let ticket = device.submit_in_turn(stream, after, Box::new(job));
    *last = Some(ticket.clone());
    Ok(ticket)
}

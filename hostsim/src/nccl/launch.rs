//! Putting operations into streams.
//!
//! Operations of one communicator run one after the other even when they are given to different
//! streams, because they share the communicator's slots; NCCL orders them likewise.

use std::sync::Arc;

use super::collective::Collective;
use super::comm::Comm;
use super::error::Outcome;
use super::transfer::{self, Transfer};
use crate::cuda::device;
use crate::cuda::queue::{Job, Stream};

/// The sends and receives of one group on one communicator.
pub(crate) struct Bundle {
    pub(crate) comm: Arc<Comm>,
    streams: Vec<Arc<Stream>>,
    transfers: Vec<Transfer>,
}

impl Bundle {
    pub(crate) fn new(comm: Arc<Comm>, stream: Arc<Stream>, transfer: Transfer) -> Self {
        Self {
            comm,
            streams: vec![stream],
            transfers: vec![transfer],
        }
    }

    pub(crate) fn add(&mut self, stream: Arc<Stream>, transfer: Transfer) {
        if !self.streams.iter().any(|known| Arc::ptr_eq(known, &stream)) {
            self.streams.push(stream);
        }
        self.transfers.push(transfer);
    }

    /// Submits the bundle as one operation, in the order of all its streams.
    pub(crate) fn launch(self) -> Outcome<()> {
        let transfers = self.transfers;
        submit(&self.comm, &self.streams, move |comm| {
            transfer::run(comm, transfers)
        })
    }
}

/// Submits a collective.
pub(crate) fn collective(
    comm: &Arc<Comm>,
    stream: &Arc<Stream>,
    collective: Collective,
) -> Outcome<()> {
    submit(comm, std::slice::from_ref(stream), move |comm| {
        collective.run(comm)
    })
}

fn submit(
    comm: &Arc<Comm>,
    streams: &[Arc<Stream>],
    operation: impl FnOnce(&Comm) -> Outcome<()> + Send + 'static,
) -> Outcome<()> {
    comm.health()?;
    comm.connect()?;
    let Some((first, others)) = streams.split_first() else {
        return Ok(());
    };
    let mut last = comm.last.lock();
    let mut after: Vec<_> = last.clone().into_iter().collect();
    after.extend(others.iter().filter_map(Stream::pending));
    let owner = Arc::clone(comm);
    let job: Job = Box::new(move || owner.execute(operation));
    let ticket = device::submit(first, after, job)?;
    for other in others {
        device::submit(other, vec![ticket.clone()], Box::new(|| Ok(())))?;
    }
    *last = Some(ticket);
    Ok(())
}

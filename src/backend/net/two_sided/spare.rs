//! Communicators kept after their groups end, for the next group over the same ranks.
//!
//! Connecting nodes takes half a second, and ending a communicator frees memory, for which there may be no moment while
//! graphs are alive. So the last few are kept. The surplus ends at a quiescent moment, in a call that begins or ends a
//! group.
//!
//! A group takes one only if all its ranks have kept it. Two groups created concurrently could disagree on who gets it:
//! whoever offers a communicator holds it exclusively until the ranks have decided.

use crate::backend::device::Device;
use crate::backend::nccl::own::OwnCommunicator;
use crate::backend::net::two_sided::ending::Ending;
use crate::model::ids::CommRank;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many are kept per context.
pub const MOST: usize = 4;
/// Bytes of an offer among ranks.
pub const OFFER_BYTES: usize = MOST * size_of::<u64>();
/// How long a call may take to end the surplus: the ranks of a node may not agree on which ones can end, and NCCL may
/// wait for all of them.
const FOR_ENDING: Duration = Duration::from_secs(2);

/// The most recent is last.
static SPARE: Mutex<Vec<Ending>> = Mutex::new(Vec::new());

/// Keeps a healthy communicator with no operations left, except in graphs.
pub fn keep(comm: Ending) {
    let context = comm.context_number();
    SPARE.lock().push(comm);
    let start = Instant::now();
    for (index, comm) in surplus(context).into_iter().enumerate() {
        let left = FOR_ENDING.saturating_sub(start.elapsed());
        if let Err(comm) = comm.end(left) {
            // Others may have been taken out meanwhile.
            let mut spare = SPARE.lock();
            let at = index.min(spare.len());
            spare.insert(at, comm);
        }
    }
}

/// Takes out the oldest ones beyond the limit, except those that a graph uses.
fn surplus(context: u64) -> Vec<Ending> {
    let mut spare = SPARE.lock();
    let is_there = |it: &&Ending| it.context_number() == context;
    let mut excess = spare.iter().filter(is_there).count().saturating_sub(MOST);
    let ends = |it: &mut Ending| {
        let ends = excess > 0 && is_there(&&*it) && !it.comm.is_in_graphs();
        excess -= usize::from(ends);
        ends
    };
    spare.extract_if(.., ends).collect()
}

/// Communicators that a group being created may take. The others return to the spares.
pub struct Offer(Vec<Ending>);

impl Offer {
    /// Those with rank and number of ranks `place`, in the context of `device`, and without a known error.
    pub fn new(device: &dyn Device, place: (usize, CommRank)) -> Self {
        let fits = |comm: &mut Ending| comm.fits(device, place);
        let mut spare = SPARE.lock();
        let mut offered: Vec<Ending> = spare.extract_if(.., fits).collect();
        // Most recent first.
        offered.reverse();
        spare.extend(offered.split_off(MOST.min(offered.len())).into_iter().rev());
        Self(offered)
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.0.iter().flat_map(|spare| spare.comm.tag.to_le_bytes()).collect();
        bytes.resize(OFFER_BYTES, 0);
        bytes
    }

    /// The one that all ranks agreed on.
    pub fn take(&mut self, tag: u64) -> Option<Arc<OwnCommunicator>> {
        Some(self.0.remove(self.0.iter().position(|spare| spare.comm.tag == tag)?).comm)
    }
}

impl Drop for Offer {
    fn drop(&mut self) {
        SPARE.lock().extend(self.0.drain(..).rev());
    }
}

/// The communicator that all ranks' offers have in common.
pub fn in_common(offers: &[&[u8]]) -> Option<u64> {
    let tags = |offer: &&[u8]| -> Vec<u64> {
        let (tags, _) = offer.as_chunks();
        tags.iter().map(|&tag| u64::from_le_bytes(tag)).collect()
    };
    let (first, others) = offers.split_first()?;
    let others: Vec<_> = others.iter().map(tags).collect();
    let mut common = tags(first).into_iter();
    common.find(|tag| *tag != 0 && others.iter().all(|other| other.contains(tag)))
}

#[cfg(test)]
#[path = "spare_tests.rs"]
mod tests;

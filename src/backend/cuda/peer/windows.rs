//! The windows that a group's ranks map, from mapping to teardown.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::peer::teardown::{Parting, Teardown};
use crate::backend::cuda::peer::window::{PeerMapping, Window, WindowRecord};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use crate::model::topology::LocalRanks;

/// What a rank reports about its mappings at the end.
const UNMAPPED: u8 = 1;
const STILL_MAPPED: u8 = 2;

/// Bytes of a window of words alone: the least that shares no page with another allocation.
pub const WORDS_BYTES: usize = 2 << 20;

/// One rank's window, and its mappings of the others'.
pub struct PeerWindows {
    mappings: Vec<PeerMapping>,
    window: Window,
}

impl PeerWindows {
    /// This rank's `window`, without mappings of the others' yet.
    pub fn new(window: Window) -> Self {
        Self {
            mappings: Vec::new(),
            window,
        }
    }

    /// Start of this rank's window.
    pub fn base(&self) -> DevPtr {
        self.window.base()
    }

    /// Maps the windows of the other ranks of this node, in rank order; `records` are those of all ranks of
    /// the group. Each window has `bytes`. If one fails, the earlier mappings stay, to be unmapped with the
    /// rest.
    pub fn map_peers(&mut self, ranks: &LocalRanks, records: &[&[u8]], bytes: usize) -> Result<()> {
        let rank = ranks.own_rank();
        let others = records.iter().enumerate();
        let others = others.filter(|&(peer, _)| peer != rank && ranks.ranks().contains(&peer));
        for (peer, record) in others {
            let mapping = WindowRecord::from_bytes(record)
                .and_then(|record| PeerMapping::new(self.window.context(), &record, bytes))
                .map_err(|error| {
                    error.within(format_args!("rank {rank} cannot map rank {peer}'s window"))
                })?;
            self.mappings.push(mapping);
        }
        Ok(())
    }

    /// The windows of this node's ranks, once all are mapped; `own` is this rank's local index.
    pub fn bases(&self, own: usize) -> Vec<DevPtr> {
        let mut bases: Vec<DevPtr> = self.mappings.iter().map(PeerMapping::base).collect();
        bases.insert(own, self.window.base());
        bases
    }

    /// Unmaps the peers' windows if the device is quiescent. Gives the own window back once all ranks
    /// have unmapped it, or leaves it to the next group if one could not. No kernel of any rank
    /// uses a window any more. Collective.
    ///
    /// It must not wait for a quiescent device: another thread may be in an exchange whose peers wait
    /// here for an exchange of this rank.
    pub fn release(self, bootstrap: &Bootstrap, stream: Stream) -> Result<()> {
        let Self { mappings, window } = self;
        let mine = match PeerMapping::unmap(mappings) {
            true => UNMAPPED,
            false => STILL_MAPPED,
        };
        let reports = bootstrap.all_gather(&[mine], stream)?;
        match reports.iter().all(|it| *it == [UNMAPPED]) {
            true => window.free(),
            false => window.keep(),
        }
        Ok(())
    }

    /// The same for ranks that have left together through the words of `teardown`, by words again. These lie in
    /// `words`, which then serve the process's next group, or in the window itself, which does.
    pub fn part(self, words: Option<Self>, teardown: &Teardown) -> Result<()> {
        let Self { mappings, window } = self;
        if mappings.is_empty() {
            window.free();
            return Ok(());
        }
        let unmapped = match &words {
            Some(_) => PeerMapping::unmap(mappings),
            None => false,
        };
        match (teardown.part(unmapped)?, words) {
            (Parting::AllUnmapped, Some(words)) => {
                window.free();
                words.keep();
            }
            (Parting::SomeMapped, Some(words)) => {
                window.keep();
                words.keep();
            }
            (Parting::SomeMissing, Some(_)) => window.keep(),
            (Parting::SomeMissing, None) => drop(window),
            (Parting::AllUnmapped | Parting::SomeMapped, None) => window.keep(),
        }
        Ok(())
    }

    /// Gives up the peers' windows, and leaves the own one to the next group: a peer may still map it, but nobody
    /// writes to it.
    pub fn keep(self) {
        drop(self.mappings);
        self.window.keep();
    }

    /// Gives up the peers' windows. The own one stays allocated, as kernels of a peer may write to
    /// it.
    pub fn leave(self) {
        drop(self);
    }

    /// Ends an opening that failed with `error` on all ranks, and returns that error.
    pub fn abandon(self, bootstrap: &Bootstrap, stream: Stream, error: Error) -> Error {
        match bootstrap.lost() {
            // The error is what matters; a window that cannot be freed stays.
            None => drop(self.release(bootstrap, stream)),
            Some(_) => self.leave(),
        }
        error
    }
}

//! The windows that a group's ranks map, from mapping to teardown.

use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::peer::teardown::{Parting, Teardown};
use crate::backend::cuda::peer::window::{PeerMapping, Window, WindowRecord};
use crate::error::{Error, Result};
use crate::model::ids::{GroupRank, LocalRank};
use crate::model::node_view::NodeView;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::sync::Arc;

/// What a rank reports about its mappings at the end.
const UNMAPPED: u8 = 1;
const STILL_MAPPED: u8 = 2;

/// Bytes of a window of words alone: the least that shares no page with another allocation.
const WORDS_BYTES: usize = 2 << 20;

/// One rank's window, and its mappings of the others'.
pub struct PeerWindows {
    mappings: Vec<PeerMapping>,
    window: Window,
}

impl PeerWindows {
    /// This rank's new window of `bytes`, without mappings of the others' yet.
    fn new(memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        Ok(Self {
            mappings: Vec::new(),
            window: Window::new(memory, bytes)?,
        })
    }

    /// Start of this rank's window.
    pub fn base(&self) -> DevPtr {
        self.window.base()
    }

    /// Maps the windows of the other ranks of this node, in rank order; `records` are those of all ranks of
    /// the group. Each window has `bytes`. If one fails, the earlier mappings stay, to be unmapped with the
    /// rest.
    fn map_peers(&mut self, view: &NodeView, records: &[&[u8]], bytes: usize) -> Result<()> {
        let rank = view.rank;
        let others = GroupRank::all(records.len()).zip(records);
        let others = others.filter(|&(peer, _)| peer != rank && view.locals.contains(&peer));
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
    pub fn bases(&self, own: LocalRank) -> Vec<DevPtr> {
        let mut bases: Vec<DevPtr> = self.mappings.iter().map(PeerMapping::base).collect();
        bases.insert(own.index(), self.window.base());
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
        let mine = if PeerMapping::unmap(mappings) {
            UNMAPPED
        } else {
            STILL_MAPPED
        };
        let reports = bootstrap.all_gather(&[mine], stream)?;
        if reports.iter().all(|it| *it == [UNMAPPED]) {
            window.free()
        } else {
            window.keep()
        }
        Ok(())
    }

    /// Gives up the peers' windows, and leaves the own one to the next group: a peer may still map it, but nobody
    /// writes to it.
    fn keep(self) {
        drop(self.mappings);
        self.window.keep();
    }

    /// Ends an opening that failed with `error` on all ranks, and returns that error.
    fn abandon(self, bootstrap: &Bootstrap, stream: Stream, error: Error) -> Error {
        match bootstrap.lost() {
            // The error is what matters; a window that cannot be freed stays.
            None => drop(self.release(bootstrap, stream)),
            // The own one stays allocated, as kernels of a peer may write to it.
            Some(_) => drop(self),
        }
        error
    }
}

/// What one rank has of its group's windows.
pub struct GroupWindows {
    /// For operations.
    pub operations: PeerWindows,
    /// Over nodes, for words to the other ranks of this node; `None` without such ranks. Once the ranks have left, such
    /// words say whether the windows of operations can be freed.
    pub words: Option<PeerWindows>,
}

impl GroupWindows {
    /// Bytes of a record: a half for each window, the second zeros if there is none.
    pub const RECORD_BYTES: usize = 2 * WindowRecord::BYTES;

    /// This rank's own, for operations with so many `bytes`.
    pub fn new(memory: &Arc<CudaMemory>, bytes: usize, has_words: bool) -> Result<Self> {
        let operations = PeerWindows::new(memory, bytes)?;
        let words = has_words.then(|| PeerWindows::new(memory, WORDS_BYTES));
        Ok(Self {
            operations,
            words: words.transpose()?,
        })
    }

    /// What the other ranks need to reach them.
    pub fn record(&self) -> Result<Vec<u8>> {
        let mut record = WindowRecord::new(&self.operations.window)?.to_bytes();
        if let Some(words) = &self.words {
            record.extend(WindowRecord::new(&words.window)?.to_bytes());
        }
        record.resize(Self::RECORD_BYTES, 0);
        Ok(record)
    }

    /// The record was sent: other ranks may map them from now on.
    pub fn publish(&mut self) {
        self.operations.window.publish();
        if let Some(words) = &mut self.words {
            words.window.publish();
        }
    }

    /// Maps those of the other ranks of this node; `records` are those of all ranks of the group. Each window of
    /// operations has `bytes`.
    pub fn map_peers(&mut self, view: &NodeView, records: &[Vec<u8>], bytes: usize) -> Result<()> {
        let halves = records.iter().map(|it| it.split_at(WindowRecord::BYTES));
        let (first, second): (Vec<&[u8]>, Vec<&[u8]>) = halves.unzip();
        self.operations.map_peers(view, &first, bytes)?;
        match &mut self.words {
            Some(words) => words.map_peers(view, &second, WORDS_BYTES),
            None => Ok(()),
        }
    }

    /// As [`PeerWindows::release`], for ranks that have left together through the words of `teardown`, by words again.
    /// These lie in windows of their own, which then serve the process's next group, or in the window of operations,
    /// which does.
    pub fn part(self, teardown: &Teardown) -> Result<()> {
        let Self { operations, words } = self;
        let PeerWindows { mappings, window } = operations;
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

    /// Ends an opening that failed with `error` on all ranks, and returns that error. Nobody has written a word.
    pub fn abandon(self, bootstrap: &Bootstrap, stream: Stream, error: Error) -> Error {
        if let Some(words) = self.words {
            words.keep();
        }
        self.operations.abandon(bootstrap, stream, error)
    }
}

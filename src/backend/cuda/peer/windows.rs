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

/// Bytes of a window that only has words: the minimum that shares no page with another allocation.
const WORDS_BYTES: usize = 2 << 20;

/// One rank's window, and its mappings of the others'.
pub struct PeerWindows {
    mappings: Vec<PeerMapping>,
    pub window: Window,
}

impl PeerWindows {
    /// This rank's `window`, without any mappings yet.
    pub fn new(window: Window) -> Self {
        Self { mappings: Vec::new(), window }
    }

    /// Maps the windows of this node's other ranks, in rank order; `records` are those of all ranks of the group. Each
    /// window has `bytes`. After a failure the earlier mappings stay, to be unmapped with the rest.
    fn map_peers(&mut self, view: &NodeView, records: &[&[u8]], bytes: usize) -> Result<()> {
        let rank = view.rank;
        let others = GroupRank::all(records.len()).zip(records);
        let others = others.filter(|&(peer, _)| peer != rank && view.locals.contains(&peer));
        for (peer, record) in others {
            let record = WindowRecord::from_bytes(record)?;
            self.map(view, peer, &record, Some(bytes))?;
        }
        Ok(())
    }

    /// Maps the window of `peer`, of `bytes` if that is known; returns its address.
    pub fn map(
        &mut self,
        view: &NodeView,
        peer: GroupRank,
        record: &WindowRecord,
        bytes: Option<usize>,
    ) -> Result<DevPtr> {
        let Window { context, is_given, .. } = &self.window;
        let mapping = PeerMapping::new(context, record, bytes.unwrap_or_else(|| record.bytes()), *is_given);
        self.keep(view, peer, mapping)
    }

    /// Keeps a new `mapping` of `peer`'s memory; returns its address.
    pub fn keep(&mut self, view: &NodeView, peer: GroupRank, mapping: Result<PeerMapping>) -> Result<DevPtr> {
        let rank = view.rank;
        let named = |error: Error| error.within(format_args!("rank {rank} cannot map rank {peer}'s window"));
        let mapping = mapping.map_err(named)?;
        let base = mapping.base();
        self.mappings.push(mapping);
        Ok(base)
    }

    /// Unmaps the peers' windows if the device is quiescent; returns whether none is left.
    pub fn unmap(&mut self) -> bool {
        PeerMapping::unmap(&mut self.mappings)
    }

    /// Ends this rank's window: freed if no peer maps it any more, otherwise left to the next group.
    pub fn give_back(self, all_unmapped: bool) {
        drop(self.mappings);
        if all_unmapped {
            self.window.free();
        } else {
            self.window.keep();
        }
    }

    /// The addresses of the windows of this node's ranks, once all are mapped; `own` is this rank's local index.
    pub fn bases(&self, own: LocalRank) -> Vec<DevPtr> {
        let mut bases: Vec<DevPtr> = self.mappings.iter().map(PeerMapping::base).collect();
        bases.insert(own.index(), self.window.base());
        bases
    }

    /// Unmaps the peers' windows if the device is quiescent. Frees this rank's once all ranks have unmapped them, or
    /// leaves them to the next group if a rank could not. No kernel of any rank uses a window any more. Collective.
    ///
    /// It must not wait for a quiescent device: another thread may be in an exchange whose peers wait here for an
    /// exchange of this rank.
    pub fn release(mut all: Vec<Self>, bootstrap: &Bootstrap, stream: Stream) -> Result<()> {
        let mine = if Self::unmap_all(&mut all) { UNMAPPED } else { STILL_MAPPED };
        let all_unmapped = bootstrap.all_gather(&[mine], stream)?.iter().all(|it| *it == [UNMAPPED]);
        all.into_iter().for_each(|it| it.give_back(all_unmapped));
        Ok(())
    }

    fn unmap_all(all: &mut [Self]) -> bool {
        PeerMapping::unmap(all.iter_mut().flat_map(|it| &mut it.mappings))
    }
}

/// A rank's windows in a group.
pub struct GroupWindows {
    pub operations: PeerWindows,
    /// Over several nodes, for words to this node's other ranks; `None` without such ranks. After the ranks have left,
    /// these words say whether the windows of operations can be freed.
    pub words: Option<PeerWindows>,
}

impl GroupWindows {
    /// Bytes of a record: one half per window, the second zeros if there is none.
    pub const RECORD_BYTES: usize = 2 * WindowRecord::BYTES;

    /// This rank's own, with `bytes` for operations.
    pub fn new(memory: &Arc<CudaMemory>, bytes: usize, has_words: bool) -> Result<Self> {
        let operations = PeerWindows::new(Window::new(memory, bytes)?);
        let words = has_words.then(|| Window::new(memory, WORDS_BYTES).map(PeerWindows::new));
        Ok(Self { operations, words: words.transpose()? })
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

    /// Maps those of this node's other ranks; `records` are those of all ranks of the group. Each window for operations
    /// has `bytes`.
    pub fn map_peers(&mut self, view: &NodeView, records: &[Vec<u8>], bytes: usize) -> Result<()> {
        let halves = records.iter().map(|it| it.split_at(WindowRecord::BYTES));
        let (first, second): (Vec<&[u8]>, Vec<&[u8]>) = halves.unzip();
        self.operations.map_peers(view, &first, bytes)?;
        match &mut self.words {
            Some(words) => words.map_peers(view, &second, WORDS_BYTES),
            None => Ok(()),
        }
    }

    /// As [`PeerWindows::release`], but for ranks that have left together through the words of `teardown`, by words
    /// again. The windows with the words, their own or those of operations, then serve the process's next group. The
    /// `objects` end like the window of operations.
    pub fn part(self, objects: Vec<PeerWindows>, teardown: &Teardown) -> Result<()> {
        let Self { operations, words } = self;
        let is_alone = operations.mappings.is_empty();
        let mut all = objects;
        all.push(operations);
        let give_back = |all: Vec<PeerWindows>, unmapped| all.into_iter().for_each(|it| it.give_back(unmapped));
        if is_alone {
            give_back(all, true);
            return Ok(());
        }
        let parting = teardown.part(words.is_some() && PeerWindows::unmap_all(&mut all))?;
        match (parting, words) {
            // A word may still come to the windows that have them, so these stay allocated.
            (Parting::SomeMissing, None) => drop(all),
            (Parting::SomeMissing, Some(_)) => give_back(all, false),
            (_, words) => {
                give_back(all, parting == Parting::AllUnmapped);
                words.into_iter().for_each(|it| it.give_back(false));
            }
        }
        Ok(())
    }

    /// Ends an opening that failed with `error` on all ranks, and returns that error. No word has been written.
    pub fn abandon(self, bootstrap: &Bootstrap, stream: Stream, error: Error) -> Error {
        if let Some(words) = self.words {
            words.give_back(false);
        }
        match bootstrap.lost() {
            // `error` is the one to report; a window that cannot be freed stays.
            None => drop(PeerWindows::release(vec![self.operations], bootstrap, stream)),
            // This rank's stays allocated, as a peer's kernels may write to it.
            Some(_) => drop(self.operations),
        }
        error
    }
}

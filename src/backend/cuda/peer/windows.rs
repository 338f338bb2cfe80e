//! A group's windows on one rank, from their creation to the teardown.

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

/// A rank's report, at the end, that it has unmapped all windows.
const UNMAPPED: u8 = 1;
const STILL_MAPPED: u8 = 2;

/// Bytes of a window that only has words: the least that does not share a page with other allocations.
const WORDS_BYTES: usize = 2 << 20;

/// A rank's window, and its mappings of other ranks' windows.
pub struct PeerWindows {
    mappings: Vec<PeerMapping>,
    pub window: Window,
}

impl PeerWindows {
    /// This rank's `window`, without any mappings yet.
    pub fn new(window: Window) -> Self {
        Self { mappings: Vec::new(), window }
    }

    /// Maps the windows of this node's other ranks, in rank order, given the `records` of all ranks of the group. Each
    /// window has `bytes`. After a failure the mappings made so far stay, to be unmapped later.
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

    /// Maps the window of `peer`, of `bytes` if the size is known; returns its address.
    pub fn map(
        &mut self,
        view: &NodeView,
        peer: GroupRank,
        record: &WindowRecord,
        bytes: Option<usize>,
    ) -> Result<DevPtr> {
        let Window { context, is_of_caller, .. } = &self.window;
        let mapping = PeerMapping::new(context, record, bytes.unwrap_or_else(|| record.bytes()), *is_of_caller);
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

    /// Frees this rank's window if no peer maps it any more; otherwise leaves it to the next group.
    pub fn give_back(self, all_unmapped: bool) {
        drop(self.mappings);
        if all_unmapped {
            self.window.free();
        } else {
            self.window.keep();
        }
    }

    /// The addresses of the windows of this node's ranks; all must be mapped. `own` is this rank's local index.
    pub fn bases(&self, own: LocalRank) -> Vec<DevPtr> {
        let mut bases: Vec<DevPtr> = self.mappings.iter().map(PeerMapping::base).collect();
        bases.insert(own.index(), self.window.base());
        bases
    }

    /// Unmaps the peers' windows if the device is quiescent. Then frees this rank's if all ranks have unmapped them, or
    /// leaves them to the next group. To be called when no kernel of any rank uses a window any more. Collective.
    ///
    /// Must not wait until the device is quiescent, as another thread may be in an exchange whose peers wait here for
    /// this rank.
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

/// All windows of a rank in a group.
pub struct GroupWindows {
    pub operations: PeerWindows,
    /// Over several nodes, the windows for teardown words; `None` if this node has no other ranks. After the ranks have
    /// left, the words say whether the windows of operations can be freed.
    pub words: Option<PeerWindows>,
}

impl GroupWindows {
    /// Bytes of a record: half of it for each window; the second half is zeros if there is no window for words.
    pub const RECORD_BYTES: usize = 2 * WindowRecord::BYTES;

    /// Creates this rank's windows, with `bytes` for operations.
    pub fn new(memory: &Arc<CudaMemory>, bytes: usize, has_words: bool) -> Result<Self> {
        let operations = PeerWindows::new(Window::new(memory, bytes)?);
        let words = has_words.then(|| Window::new(memory, WORDS_BYTES).map(PeerWindows::new));
        Ok(Self { operations, words: words.transpose()? })
    }

    /// What other ranks need to map the windows.
    pub fn record(&self) -> Result<Vec<u8>> {
        let mut record = WindowRecord::new(&self.operations.window)?.to_bytes();
        if let Some(words) = &self.words {
            record.extend(WindowRecord::new(&words.window)?.to_bytes());
        }
        record.resize(Self::RECORD_BYTES, 0);
        Ok(record)
    }

    /// Records that other ranks may map the windows from now on.
    pub fn publish(&mut self) {
        self.operations.window.publish();
        if let Some(words) = &mut self.words {
            words.window.publish();
        }
    }

    /// Maps the windows of this node's other ranks, given the `records` of all ranks of the group. Each window for
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

    /// As [`PeerWindows::release`], for ranks that have left together by the words of `teardown`: agrees by words, too.
    /// The windows that have the words are then left to the process's next group. `objects` are treated as the windows
    /// of operations.
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
            // A word may still be written to these windows, so they stay allocated.
            (Parting::SomeMissing, None) => drop(all),
            (Parting::SomeMissing, Some(_)) => give_back(all, false),
            (_, words) => {
                give_back(all, parting == Parting::AllUnmapped);
                words.into_iter().for_each(|it| it.give_back(false));
            }
        }
        Ok(())
    }

    /// Releases the windows after an opening that failed with `error` on all ranks, before any word; returns the error.
    pub fn abandon(self, bootstrap: &Bootstrap, stream: Stream, error: Error) -> Error {
        if let Some(words) = self.words {
            words.give_back(false);
        }
        match bootstrap.lost() {
            // Only `error` is reported; a window that cannot be freed stays.
            None => drop(PeerWindows::release(vec![self.operations], bootstrap, stream)),
            // This rank's window stays allocated, as kernels of peers may write to it.
            Some(_) => drop(self.operations),
        }
        error
    }
}

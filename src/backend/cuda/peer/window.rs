//! A rank's window, and its mappings of other ranks' windows.
//!
//! Ranks of one process use each other's addresses. Between processes, ranks map an exported handle (CUDA IPC), which
//! works with every driver, even if a process sees only one GPU. Both are a [`PeerMapping`], which hides the
//! difference.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::context_handle::{self, ContextHandle};
use crate::backend::cuda::driver::exports::{self, Piece};
use crate::backend::cuda::driver::memory::{self, CudaMemory};
use crate::backend::cuda::driver::{self};
use crate::backend::cuda::peer::descriptors::{PROCESS_ID_BYTES, ProcessId, Received};
use crate::backend::device::Memory;
use crate::backend::quiescence::{IPC_HANDLE_BYTES, Key};
use crate::error::{Code, Error, Result};
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::os::fd::AsFd;
use std::sync::Arc;

/// The allocation of a window, as records contain it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Allocation {
    context: ContextHandle,
    base: u64,
    bytes: u64,
}

/// The live windows of this process: an address in a record is accepted only if it is one of them.
static LIVE: Mutex<Vec<Allocation>> = Mutex::new(Vec::new());

/// Device memory that other ranks may map. If dropped after `publish`, it stays allocated, as a peer may map it.
pub struct Window {
    pub context: Arc<Context>,
    allocation: Allocation,
    /// Whether the memory is a caller's, which is never freed here.
    pub is_of_caller: bool,
    is_published: bool,
    /// Whether the memory was another group's, a peer of which may still map it.
    must_stay: bool,
}

impl Window {
    /// A window of `bytes` zeros.
    pub fn new(memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        let window = Self::with_any(memory, bytes)?;
        memory.zero(window.base(), bytes)?;
        Ok(window)
    }

    /// A window of `bytes` with arbitrary content, possibly reused from another group.
    pub fn with_any(memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        let context = &memory.context;
        let left = context.quiescence.take(&Key::Window(bytes));
        let base = match left {
            Some(left) => DevPtr(left.address),
            None => memory.alloc(bytes)?,
        };
        let mut window = Self::over(context, base, bytes);
        window.must_stay = left.is_some_and(|left| left.must_stay);
        Ok(window)
    }

    /// The caller's allocation that contains `data`.
    pub fn of_caller(context: &Arc<Context>, data: DevPtr) -> Result<Self> {
        let (base, bytes) = driver::allocation_of(data)?;
        Ok(Self::of_pieces(context, base, bytes))
    }

    /// The caller's `bytes` at `base`, composed of pieces.
    pub fn of_pieces(context: &Arc<Context>, base: DevPtr, bytes: usize) -> Self {
        let mut window = Self::over(context, base, bytes);
        window.is_of_caller = true;
        window
    }

    fn over(context: &Arc<Context>, base: DevPtr, bytes: usize) -> Self {
        let allocation = Allocation { context: context.handle(), base: base.0 as u64, bytes: bytes as u64 };
        LIVE.lock().push(allocation);
        Self { context: Arc::clone(context), allocation, is_of_caller: false, is_published: false, must_stay: false }
    }

    /// Records that other ranks may map the window from now on.
    pub fn publish(&mut self) {
        self.is_published = true;
    }

    pub fn base(&self) -> DevPtr {
        DevPtr(self.allocation.base as usize)
    }

    /// Frees the memory. To be called when no peer of this group maps it any more.
    pub fn free(mut self) {
        self.is_published = false;
    }

    /// Leaves the memory to the next group that needs a window of this size. A peer may still map it, but not use it.
    pub fn keep(mut self) {
        self.is_published = false;
        self.must_stay = true;
    }

    fn key(&self) -> Key {
        Key::Window(self.allocation.bytes as usize)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let mut live = LIVE.lock();
        if let Some(index) = live.iter().position(|allocation| *allocation == self.allocation) {
            live.swap_remove(index);
        }
        drop(live);
        if self.is_of_caller {
            return;
        }
        match (self.is_published, self.must_stay) {
            (true, _) => {}
            (false, true) => self.context.keep(self.key(), self.base().0),
            (false, false) => {
                self.context.free_later(Some(self.key()), self.base().0, memory::free);
            }
        }
    }
}

/// What other ranks need to map a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowRecord {
    pub process: ProcessId,
    allocation: Allocation,
    ipc: [u8; IPC_HANDLE_BYTES],
}

impl WindowRecord {
    pub fn bytes(&self) -> usize {
        self.allocation.bytes as usize
    }

    pub const BYTES: usize = PROCESS_ID_BYTES + 3 * size_of::<u64>() + IPC_HANDLE_BYTES;

    pub fn new(window: &Window) -> Result<Self> {
        let _entered = window.context.enter()?;
        Ok(Self { process: ProcessId::this()?, allocation: window.allocation, ipc: exports::export(window.base())? })
    }

    /// The record of a window that peers map in pieces.
    pub fn of_pieces(window: &Window) -> Result<Self> {
        Ok(Self { process: ProcessId::this()?, allocation: window.allocation, ipc: [0; IPC_HANDLE_BYTES] })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.process.to_bytes().to_vec();
        bytes.extend_from_slice(&self.allocation.context.to_bits().to_le_bytes());
        bytes.extend_from_slice(&self.allocation.base.to_le_bytes());
        bytes.extend_from_slice(&self.allocation.bytes.to_le_bytes());
        bytes.extend_from_slice(&self.ipc);
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut rest = bytes;
        let record = Self {
            process: ProcessId::from_bytes(take(&mut rest)?),
            allocation: Allocation {
                context: ContextHandle::from_bits(u64::from_le_bytes(take(&mut rest)?)),
                base: u64::from_le_bytes(take(&mut rest)?),
                bytes: u64::from_le_bytes(take(&mut rest)?),
            },
            ipc: take(&mut rest)?,
        };
        match rest {
            [] => Ok(record),
            _ => Err(Error::internal("a long window record")),
        }
    }

    /// The window's allocation if it is in this process; `None` if not. An error if its length is not `bytes`, or if
    /// the window does not exist any more, because its rank has given up.
    fn here(&self, bytes: usize) -> Result<Option<Allocation>> {
        if self.allocation.bytes != bytes as u64 {
            return Err(
                Error::internal("a window of another length").got(self.allocation.bytes, format_args!("{bytes} bytes"))
            );
        }
        if self.process != ProcessId::this()? {
            return Ok(None);
        }
        if LIVE.lock().contains(&self.allocation) {
            Ok(Some(self.allocation))
        } else {
            Err(Error::new(Code::RemoteError, "this process has no such window any more"))
        }
    }
}

/// The next `N` bytes of `rest`.
fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N]> {
    let (head, tail) = rest.split_first_chunk().ok_or_else(|| Error::internal("a short window record"))?;
    *rest = tail;
    Ok(*head)
}

/// A peer's window, as mapped by this rank.
pub struct PeerMapping {
    context: Arc<Context>,
    base: DevPtr,
    imported: Option<Import>,
}

/// How a mapping must be undone.
enum Import {
    /// A mapped allocation, and the key for which the mapping may be reused.
    Whole(Option<Key>),
    /// Pieces of these sizes.
    Pieces(Vec<usize>),
}

impl Import {
    /// Unmaps `address` in the current context. A destroyed context has no mappings any more.
    fn close(&self, address: usize) {
        match self {
            Self::Whole(_) => drop(exports::close_import(DevPtr(address))),
            Self::Pieces(sizes) => exports::unmap(DevPtr(address), sizes),
        }
    }
}

impl PeerMapping {
    /// Maps the window of `record`, which must have `bytes`, into `context`. If it `is_of_caller`, the mapping will not
    /// be reused: the caller may free the memory first, and other memory may then get the same handle.
    pub fn new(context: &Arc<Context>, record: &WindowRecord, bytes: usize, is_of_caller: bool) -> Result<Self> {
        let _entered = context.enter()?;
        let here = record.here(bytes)?;
        let key = (!is_of_caller).then_some(Key::Import(record.ipc));
        let base = match here {
            Some(allocation) => {
                if allocation.context != context.handle() {
                    context_handle::enable_peer_access(allocation.context)?;
                }
                DevPtr(allocation.base as usize)
            }
            None => match key.and_then(|key| context.quiescence.take(&key)) {
                Some(left) => DevPtr(left.address),
                None => exports::import(record.ipc).map_err(rank_is_gone)?,
            },
        };
        let imported = here.is_none().then_some(Import::Whole(key));
        Ok(Self { context: Arc::clone(context), base, imported })
    }

    /// Maps the memory of `record` from the pieces that `came` from its process; `None` if that is this process.
    pub fn of_pieces(context: &Arc<Context>, record: &WindowRecord, came: Option<Received>) -> Result<Self> {
        let _entered = context.enter()?;
        let pieces = match (record.here(record.bytes())?, came) {
            (Some(allocation), _) => Piece::all(DevPtr(allocation.base as usize), record.bytes())?.1,
            (None, came) => came.map_or(Ok(Vec::new()), |came| {
                let all = came.descriptors.iter().zip(&came.sizes);
                all.map(|(descriptor, size)| Piece::import(descriptor.as_fd(), *size)).collect::<Result<_>>()
            })?,
        };
        let sizes: Vec<usize> = pieces.iter().map(|piece| piece.bytes).collect();
        if sizes.iter().sum::<usize>() != record.bytes() {
            return Err(Error::new(Code::RemoteError, "the memory has changed since its rank has registered it"));
        }
        let base = exports::map(&pieces)?;
        Ok(Self { context: Arc::clone(context), base, imported: Some(Import::Pieces(sizes)) })
    }

    pub fn base(&self) -> DevPtr {
        self.base
    }

    /// Unmaps `mappings` now if the device is quiescent; returns whether none is left.
    pub fn unmap<'a>(mappings: impl IntoIterator<Item = &'a mut Self>) -> bool {
        let mut imported: Vec<&mut Self> = mappings.into_iter().filter(|it| it.imported.is_some()).collect();
        let Some(context) = imported.first().map(|it| Arc::clone(&it.context)) else { return true };
        context.if_quiescent(|| {
            for mapping in &mut imported {
                if let Some(import) = mapping.imported.take() {
                    import.close(mapping.base.0);
                }
            }
        })
    }
}

/// The error of an import, which usually fails because the rank has died since it sent its record.
fn rank_is_gone(cause: Error) -> Error {
    Error::new(Code::RemoteError, cause.text())
}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        if let Some(import) = self.imported.take() {
            let key = match import {
                Import::Whole(key) => key,
                Import::Pieces(_) => None,
            };
            self.context.free_later(key, self.base.0, move |address| import.close(address));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(base: u64) -> WindowRecord {
        WindowRecord {
            process: ProcessId::this().unwrap(),
            allocation: Allocation { context: ContextHandle::from_bits(0x1234_5678_9abc), base, bytes: 0x20_0000 },
            ipc: std::array::from_fn(|index| index as u8),
        }
    }

    #[test]
    fn a_record_survives_the_exchange() {
        let record = record(0x7f00_0020_0000);
        let bytes = record.to_bytes();
        assert_eq!(bytes.len(), WindowRecord::BYTES);
        assert_eq!(WindowRecord::from_bytes(&bytes), Ok(record));
        assert!(WindowRecord::from_bytes(&bytes[1..]).is_err());
        assert!(WindowRecord::from_bytes(&[bytes.as_slice(), &[0]].concat()).is_err());
    }

    #[test]
    fn an_address_of_this_process_is_that_of_a_live_window_or_refused() {
        let mine = record(0x7f00_0040_0000);
        LIVE.lock().push(mine.allocation);
        assert_eq!(mine.here(0x20_0000), Ok(Some(mine.allocation)));
        let refused = |record: &WindowRecord, bytes| record.here(bytes).unwrap_err().code();
        assert_eq!(refused(&mine, 0x40_0000), Code::InternalError);
        let elsewhere = record(0x7f00_0040_0100);
        assert_eq!(refused(&elsewhere, 0x20_0000), Code::RemoteError);
        let other_context = WindowRecord {
            allocation: Allocation { context: ContextHandle::from_bits(0x1234), ..mine.allocation },
            ..mine.clone()
        };
        assert!(other_context.here(0x20_0000).is_err());
        LIVE.lock().retain(|allocation| *allocation != mine.allocation);
        assert!(mine.here(0x20_0000).is_err());
        let theirs = ProcessId::from_bytes([7; PROCESS_ID_BYTES]);
        let theirs = WindowRecord { process: theirs, ..mine };
        assert_eq!(theirs.here(0x20_0000), Ok(None));
    }
}

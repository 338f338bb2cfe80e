//! A rank's window, and how it reaches the windows of the other ranks.
//!
//! Ranks of one process use each other's addresses; others map an exported handle (CUDA IPC), which
//! works with every driver, also where a process sees one GPU only. Both are a [`PeerMapping`], so
//! another provider of mappings needs no change elsewhere.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::cuda::context::Context;
use crate::backend::cuda::driver::{self, ContextHandle, IPC_HANDLE_BYTES};
use crate::backend::cuda::memory::CudaMemory;
use crate::backend::cuda::process::{PROCESS_ID_BYTES, ProcessId};
use crate::error::{Error, Result};
use crate::model::tensor::DevPtr;
use std::sync::Arc;

/// Device memory that the other ranks may map; zero at first.
#[derive(Debug)]
pub(super) struct Window {
    memory: Arc<CudaMemory>,
    base: DevPtr,
}

impl Window {
    /// A window of `bytes`.
    pub(super) fn new(memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        let base = memory.alloc(bytes)?;
        let window = Self {
            memory: Arc::clone(memory),
            base,
        };
        memory.zero(base, bytes)?;
        Ok(window)
    }

    /// First byte.
    pub(super) fn base(&self) -> DevPtr {
        self.base
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // A context that is gone has freed its memory.
        let _ = self.memory.free(self.base);
    }
}

/// What the other ranks must know of a window to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WindowRecord {
    process: ProcessId,
    context: u64,
    base: u64,
    ipc: [u8; IPC_HANDLE_BYTES],
}

impl WindowRecord {
    /// Length of [`WindowRecord::to_bytes`].
    pub(super) const BYTES: usize = PROCESS_ID_BYTES + 2 * size_of::<u64>() + IPC_HANDLE_BYTES;

    /// Describes `window`, which lives in `context`.
    pub(super) fn new(context: &Context, window: &Window) -> Result<Self> {
        let _entered = context.enter()?;
        Ok(Self {
            process: ProcessId::this()?,
            context: context.handle().to_bits(),
            base: window.base().0 as u64,
            ipc: driver::export(window.base())?,
        })
    }

    /// The record as the ranks exchange it.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.process.to_bytes().to_vec();
        bytes.extend_from_slice(&self.context.to_le_bytes());
        bytes.extend_from_slice(&self.base.to_le_bytes());
        bytes.extend_from_slice(&self.ipc);
        bytes
    }

    /// Reads what [`WindowRecord::to_bytes`] wrote.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut rest = bytes;
        Ok(Self {
            process: ProcessId::from_bytes(take(&mut rest)?),
            context: u64::from_le_bytes(take(&mut rest)?),
            base: u64::from_le_bytes(take(&mut rest)?),
            ipc: take(&mut rest)?,
        })
    }
}

/// The next `N` bytes of `rest`.
fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N]> {
    let (head, tail) = rest
        .split_first_chunk()
        .ok_or_else(|| Error::internal("a short window record"))?;
    *rest = tail;
    Ok(*head)
}

/// A peer's window, as this rank reaches it.
#[derive(Debug)]
pub(super) struct PeerMapping {
    context: Arc<Context>,
    base: DevPtr,
    imported: bool,
}

impl PeerMapping {
    /// Maps the window that `record` describes into `context`.
    pub(super) fn new(context: &Arc<Context>, record: &WindowRecord) -> Result<Self> {
        let _entered = context.enter()?;
        let imported = record.process != ProcessId::this()?;
        let base = if imported {
            driver::import(record.ipc)?
        } else {
            let peer = ContextHandle::from_bits(record.context);
            if peer != context.handle() {
                driver::enable_peer_access(peer)?;
            }
            DevPtr(record.base as usize)
        };
        Ok(Self {
            context: Arc::clone(context),
            base,
            imported,
        })
    }

    /// First byte.
    pub(super) fn base(&self) -> DevPtr {
        self.base
    }
}

impl Drop for PeerMapping {
    fn drop(&mut self) {
        // A context that is gone has closed its mappings.
        if self.imported
            && let Ok(_entered) = self.context.enter()
        {
            let _ = driver::close_import(self.base);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_the_exchange() {
        let record = WindowRecord {
            process: ProcessId::this().unwrap(),
            context: 0x1234_5678_9abc,
            base: 0x7f00_0020_0000,
            ipc: std::array::from_fn(|index| index as u8),
        };
        let bytes = record.to_bytes();
        assert_eq!(bytes.len(), WindowRecord::BYTES);
        assert_eq!(WindowRecord::from_bytes(&bytes), Ok(record));
        assert!(WindowRecord::from_bytes(&bytes[1..]).is_err());
    }
}

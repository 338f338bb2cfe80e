//! A context of the driver: keeping it alive, and entering it.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::{self, ContextHandle, Device, IPC_HANDLE_BYTES};
use crate::error::Result;
use std::marker::PhantomData;

/// What can be reused instead of being made anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Device memory of this many bytes that no other process knows.
    Memory(usize),
    /// A window of this many bytes.
    Window(usize),
    /// Pinned host memory of this many bytes.
    Pinned(usize),
    /// The mapping of another process's export.
    Import([u8; IPC_HANDLE_BYTES]),
}

/// An identity that no other context of the process ever has: handle and number.
pub type ContextId = (ContextHandle, u64);

/// A context of one device, kept alive.
#[derive(Debug)]
pub struct Held {
    handle: ContextHandle,
    number: u64,
    /// The device whose primary context this type keeps alive; `None` for a context of the
    /// caller's.
    retained: Option<Device>,
}

impl Held {
    /// The context `handle`; `retained` is the device to release it from.
    pub fn new(handle: ContextHandle, retained: Option<Device>) -> Result<Self> {
        let mut held = Self {
            handle,
            number: 0,
            retained,
        };
        {
            let _entered = held.enter()?;
            held.number = driver::current_context_id()?;
        }
        Ok(held)
    }

    /// The driver's handle.
    pub fn handle(&self) -> ContextHandle {
        self.handle
    }

    /// The context's identity.
    pub fn id(&self) -> ContextId {
        (self.handle, self.number)
    }

    /// Makes this the calling thread's context until the result is dropped.
    pub fn enter(&self) -> Result<Entered> {
        let pushed = driver::current_context()? != Some(self.handle);
        if pushed {
            driver::push_context(self.handle)?;
        }
        Ok(Entered {
            pushed,
            this_thread: PhantomData,
        })
    }

    /// The same for a caller that frees something there. A destroyed context has freed everything
    /// in it, and its handle may belong to another.
    pub fn enter_if_alive(&self) -> Option<Entered> {
        let entered = self.enter().ok()?;
        (driver::current_context_id() == Ok(self.number)).then_some(entered)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(device) = self.retained {
            // There is no remedy for a context that cannot be released.
            let _ = driver::release_primary(device);
        }
    }
}

/// Marks that the thread is inside a context; stays on its thread.
#[derive(Debug)]
#[must_use = "the context is left when this is dropped"]
pub struct Entered {
    pushed: bool,
    this_thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.pushed {
            // Fails only if the caller has destroyed the context, and with it this entry.
            let _ = driver::pop_context();
        }
    }
}

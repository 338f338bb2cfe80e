//! A context of the driver, kept alive, and being inside it.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::{self, ContextHandle, Device, IPC_HANDLE_BYTES};
use crate::error::Result;
use std::marker::PhantomData;

/// What can be used again instead of being made anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Device memory of so many bytes that no other process knows.
    Memory(usize),
    /// A window of so many bytes.
    Window(usize),
    /// Pinned host memory of so many bytes.
    Pinned(usize),
    /// The mapping of what another process exported.
    Import([u8; IPC_HANDLE_BYTES]),
}

/// A context, as no other of the process was or will be called: its handle and its number.
pub type ContextId = (ContextHandle, u64);

/// A context of one device, kept alive.
#[derive(Debug)]
pub struct Held {
    handle: ContextHandle,
    number: u64,
    /// The device whose primary context this type keeps alive; `None` for a context of the caller's.
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

    /// What it is called.
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

    /// The same for who has something to free there. A context that is gone has freed everything in it, and
    /// its handle may be that of another.
    pub fn enter_if_alive(&self) -> Option<Entered> {
        let entered = self.enter().ok()?;
        (driver::current_context_id() == Ok(self.number)).then_some(entered)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(device) = self.retained {
            // Nothing is left to do about a context that cannot be released.
            let _ = driver::release_primary(device);
        }
    }
}

/// Being inside a context; stays on its thread.
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

//! The CUDA context that a group lives in: the caller's own, wherever possible.
//!
//! Every call into the driver happens inside [`Context::enter`], which puts the context on the calling
//! thread and takes it off again: the caller's current context is never changed.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::{self, ContextHandle, Device};
use crate::error::{Code, Error, Result};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

/// A context of one device.
#[derive(Debug)]
pub(super) struct Context {
    handle: ContextHandle,
    /// The device whose primary context this type keeps alive; `None` for a context of the caller's.
    retained: Option<Device>,
    stranded: AtomicBool,
}

impl Context {
    /// The calling thread's context if it belongs to the device numbered `ordinal`, else that
    /// device's primary context, which is the one that the CUDA runtime uses.
    pub(super) fn for_device(ordinal: usize) -> Result<Self> {
        let device = driver::device(ordinal)?;
        if let Some(handle) = driver::current_context()?
            && driver::current_device()? == device
        {
            return Ok(Self {
                handle,
                retained: None,
                stranded: AtomicBool::new(false),
            });
        }
        Ok(Self {
            handle: driver::retain_primary(device)?,
            retained: Some(device),
            stranded: AtomicBool::new(false),
        })
    }

    /// Refuses every further [`Context::enter`]: something is stuck on the device for ever, and most
    /// calls, all that free something among them, would wait for it. What the group holds is leaked.
    pub(super) fn strand(&self) {
        self.stranded.store(true, Ordering::Relaxed);
    }

    /// The driver's handle.
    pub(super) fn handle(&self) -> ContextHandle {
        self.handle
    }

    /// Makes this the calling thread's context until the result is dropped.
    pub(super) fn enter(&self) -> Result<Entered> {
        if self.stranded.load(Ordering::Relaxed) {
            return Err(Error::new(
                Code::RemoteError,
                "an exchange that a lost rank never joined is stuck on the device",
            ));
        }
        let pushed = driver::current_context()? != Some(self.handle);
        if pushed {
            driver::push_context(self.handle)?;
        }
        Ok(Entered {
            pushed,
            this_thread: PhantomData,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(device) = self.retained
            && !self.stranded.load(Ordering::Relaxed)
        {
            // Nothing is left to do about a context that cannot be released.
            let _ = driver::release_primary(device);
        }
    }
}

/// Being inside a context; stays on its thread.
#[derive(Debug)]
#[must_use = "the context is left when this is dropped"]
pub(super) struct Entered {
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

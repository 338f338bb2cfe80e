//! What all groups of a context share for as long as it lives: the loaded kernels, and a stream for copies.
//!
//! Loading kernels waits for everything on the device. The first group loads them before its first
//! exchange, when no exchange of ours can hold that up. They stay when no group is left: the driver keeps
//! most of what a load took when it unloads (`docs/development/host-time.md`), so a process
//! whose groups come and go would grow. A context that is destroyed or reset ends both.

use crate::backend::cuda::driver;
use crate::backend::cuda::driver::context_handle::{ContextId, Held};
use crate::backend::cuda::driver::kernel_image::{self, Functions};
use crate::error::Result;
use crate::model::ops::Stream;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// The resources of one context. Locked while they are made, which waits for that context's device;
/// so each context has a lock of its own.
type Place = Arc<Mutex<Option<Arc<ContextResources>>>>;

static PLACES: Lazy<Mutex<HashMap<ContextId, Place>>> = Lazy::new(Mutex::default);

/// The resources that one context's groups share.
pub struct ContextResources {
    stream: Stream,
    kernels: Result<Functions>,
}

impl ContextResources {
    /// The resources of the context `held`, made if there are none. If the kernels cannot be loaded, the rest is made
    /// all the same, so that the other ranks can learn of it; the next group tries again.
    pub fn of(held: &Held) -> Result<Arc<Self>> {
        let place = Arc::clone(PLACES.lock().entry(held.id()).or_default());
        let mut place = place.lock();
        let stream = match &*place {
            Some(known) if known.kernels.is_ok() => return Ok(Arc::clone(known)),
            Some(known) => Some(known.stream),
            None => None,
        };
        let _entered = held.enter()?;
        let resources =
            Arc::new(Self { stream: stream.map_or_else(driver::create_stream, Ok)?, kernels: kernel_image::load() });
        *place = Some(Arc::clone(&resources));
        Ok(resources)
    }

    /// A stream that is not ordered with any other, not even with the legacy default one. It holds
    /// only copies that the host waits for.
    pub fn stream(&self) -> Stream {
        self.stream
    }

    pub fn functions(&self) -> Result<Functions> {
        self.kernels.clone()
    }
}

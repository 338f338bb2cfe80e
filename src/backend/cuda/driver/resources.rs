//! The resources that all groups of a device share: the loaded kernels, and a stream for copies.
//!
//! Loading kernels waits for everything on the device. The first group loads them before its first
//! exchange, when no exchange of ours can hold that up. They are unloaded with the last group, or
//! stay as long as an exchange is stuck on the device.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::held::{ContextId, Held, Key};
use crate::backend::cuda::driver::kernel_image::{self, Functions};
use crate::backend::cuda::driver::{self, ModuleHandle};
use crate::backend::quiet::Quiet;
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// The resources of one context, if in use. Locked while they are made, which waits for that
/// context's device; so each context has a lock of its own.
type InUse = Arc<Mutex<Weak<DeviceResources>>>;

static RESOURCES: Lazy<Mutex<HashMap<ContextId, InUse>>> = Lazy::new(Mutex::default);

/// The resources that one device's groups share.
pub struct DeviceResources {
    held: Arc<Held>,
    quiet: Arc<Quiet<Key>>,
    stream: Stream,
    kernels: Result<(ModuleHandle, Functions)>,
}

impl DeviceResources {
    /// The resources of the context `held`, made if there are none. If the kernels cannot be
    /// loaded, the rest is made all the same, so that the other ranks can learn of it.
    pub fn of(held: &Arc<Held>, quiet: &Arc<Quiet<Key>>) -> Result<Arc<Self>> {
        let in_use = Arc::clone(RESOURCES.lock().entry(held.id()).or_default());
        let mut in_use = in_use.lock();
        if let Some(resources) = in_use.upgrade() {
            return Ok(resources);
        }
        let _entered = held.enter()?;
        let resources = Arc::new(Self {
            held: Arc::clone(held),
            quiet: Arc::clone(quiet),
            stream: driver::create_stream()?,
            kernels: kernel_image::load(),
        });
        *in_use = Arc::downgrade(&resources);
        Ok(resources)
    }

    /// A stream that is not ordered with any other, not even with the legacy default one. It holds
    /// only copies that the host waits for.
    pub fn stream(&self) -> Stream {
        self.stream
    }

    /// The kernels' entry points.
    pub fn functions(&self) -> Result<Functions> {
        let kernels = self.kernels.as_ref().map_err(Error::clone);
        kernels.map(|(_, functions)| Functions::clone(functions))
    }
}

impl Drop for DeviceResources {
    fn drop(&mut self) {
        // A destroyed context has destroyed its streams and unloaded its modules.
        if let Some(_entered) = self.held.enter_if_alive() {
            let _ = driver::destroy_stream(self.stream);
        }
        if let Ok((module, _)) = self.kernels {
            let held = Arc::clone(&self.held);
            let unload = move |_| {
                if let Some(_entered) = held.enter_if_alive() {
                    let _ = driver::unload_module(module);
                }
            };
            self.quiet.later(None, 0, Some(Box::new(unload)));
        }
    }
}

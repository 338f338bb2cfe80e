//! What all groups of a device share: the loaded kernels, and a stream for copies.
//!
//! Loading kernels waits for everything on the device. The first group loads them before its first
//! exchange, when there is none of ours to wait for; they go with the last group, or stay as long as an exchange is
//! stuck on the device.
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

/// The tools of one context, if they are in use. Locked while they are made, which waits for its device; so
/// each context has a lock of its own.
type InUse = Arc<Mutex<Weak<DeviceResources>>>;

static TOOLS: Lazy<Mutex<HashMap<ContextId, InUse>>> = Lazy::new(Mutex::default);

/// What one device's groups share.
pub struct DeviceResources {
    held: Arc<Held>,
    quiet: Arc<Quiet<Key>>,
    stream: Stream,
    kernels: Result<(ModuleHandle, Functions)>,
}

impl DeviceResources {
    /// Those of the context `held`, made if nobody has them. Where the kernels cannot be loaded the rest is there,
    /// so that the other ranks can be told.
    pub fn of(held: &Arc<Held>, quiet: &Arc<Quiet<Key>>) -> Result<Arc<Self>> {
        let in_use = Arc::clone(TOOLS.lock().entry(held.id()).or_default());
        let mut in_use = in_use.lock();
        if let Some(tools) = in_use.upgrade() {
            return Ok(tools);
        }
        let _entered = held.enter()?;
        let tools = Arc::new(Self {
            held: Arc::clone(held),
            quiet: Arc::clone(quiet),
            stream: driver::create_stream()?,
            kernels: kernel_image::load(),
        });
        *in_use = Arc::downgrade(&tools);
        Ok(tools)
    }

    /// A stream that waits for no other, the legacy default one included, and holds nothing but copies that the host
    /// waits for.
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
        // A context that is gone has destroyed its streams and unloaded its modules.
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

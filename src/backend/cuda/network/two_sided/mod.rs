//! Messages between nodes for which hosts on both sides enqueue operations.

pub mod handshake;

use crate::backend::net::two_sided::{Label, Message, Transport};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The transport of a group's operations.
pub struct Exchanges {
    /// `None` once the group has closed.
    transport: RwLock<Option<Arc<dyn Transport>>>,
    /// Messages of the exchange being enqueued; kept to reuse their memory.
    messages: Mutex<(Vec<Message>, Vec<Message>)>,
    /// Number of operations so far.
    operations: AtomicU64,
}

impl Exchanges {
    pub fn new(transport: Box<dyn Transport>) -> Self {
        Self {
            transport: RwLock::new(Some(Arc::from(transport))),
            messages: Mutex::default(),
            operations: AtomicU64::new(0),
        }
    }

    pub fn transport(&self) -> Result<Arc<dyn Transport>> {
        let transport = self.transport.read();
        transport.as_ref().map(Arc::clone).ok_or_else(|| Error::internal("the network has ended"))
    }

    /// Enqueues messages on `stream`.
    pub fn enqueue(
        &self,
        label: Label,
        sends: impl IntoIterator<Item = Message>,
        receives: impl IntoIterator<Item = Message>,
        stream: Stream,
    ) -> Result<()> {
        let transport = self.transport()?;
        let (to, from) = &mut *self.messages.lock();
        to.clear();
        to.extend(sends);
        from.clear();
        from.extend(receives);
        transport.exchange(label, to, from, stream)
    }

    /// The label of the next operation, which does `what`.
    pub fn label(&self, what: &'static str) -> Label {
        let number = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        Label { what, number }
    }

    /// Releases the transport: no exchange follows.
    pub fn end(&self) {
        drop(self.transport.write().take());
    }
}

//! The objects behind the numbers that C holds.

use crate::allocator::Allocator;
use crate::settings::Kept;
use nccl_ep_abi::registry::{Names, Registry};
use nccl_ep_core::backend::nccl::Communicator;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::ops::{HandleForm, Zones};
use nccl_ep_core::session;
use std::sync::Arc;

static GROUPS: Registry<Group> = Registry::new(1, Names { argument: "ep_group", object: "group" });
static HANDLES: Registry<Handle> = Registry::new(2, Names { argument: "handle", object: "handle" });

/// A group of this ABI.
pub struct Group {
    /// The core's group.
    pub session: Arc<session::group::Group>,
    /// What this ABI keeps of the settings.
    pub kept: Kept,
    /// Whose windows tensors may be in.
    pub comm: Communicator,
    /// Who gives the memory of handles, if not the library.
    pub allocator: Option<Arc<Allocator>>,
}

impl Group {
    /// Registers the group and returns its number.
    pub fn register(self) -> usize {
        GROUPS.insert(Arc::new(self))
    }

    /// The group numbered `number`.
    pub fn resolve(number: usize) -> Result<Arc<Self>> {
        GROUPS.resolve(number)
    }

    /// Removes the group numbered `number`; later calls do not find it.
    pub fn take(number: usize) -> Result<Arc<Self>> {
        GROUPS.remove(number)
    }
}

/// A handle of this ABI.
pub struct Handle {
    /// The core's handle.
    pub core: session::handle::Handle,
    /// Its group.
    pub group: Arc<Group>,
    /// Ids per token.
    pub top_k: usize,
    /// How received rows lie.
    pub layout: Layout,
}

/// The layouts that are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// LL, by expert.
    ExpertMajor,
    /// LL, by source rank.
    RankMajor,
    /// HT, a row for all experts of a rank.
    Flat,
    /// HT, by expert in zones of a multiple of this.
    Zones(usize),
}

impl Layout {
    /// What the core's handles are like: this ABI does not give the ids again, which may have 32 bits.
    pub fn form(self, kept: &Kept) -> HandleForm {
        let zones = match self {
            Self::Zones(alignment) => Some(Zones { alignment, most_slots: kept.recv_rows.filter(|_| kept.drops) }),
            _ => None,
        };
        let most_rows = kept.recv_rows.filter(|_| kept.drops && self == Self::Flat);
        HandleForm { keeps_ids: true, zones, most_rows }
    }
}

impl Handle {
    /// Registers the handle and returns its number.
    pub fn register(self) -> usize {
        HANDLES.insert(Arc::new(self))
    }
}

/// The handle numbered `number`.
pub fn handle(number: usize) -> Result<Arc<Handle>> {
    HANDLES.resolve(number)
}

/// Removes the handle numbered `number`; later calls do not find it.
pub fn take_handle(number: usize) -> Result<Arc<Handle>> {
    HANDLES.remove(number)
}

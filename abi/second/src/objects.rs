//! The objects behind the numbers that C holds, those numbers, and the guard around every exported function.

use crate::allocator::Allocator;
use crate::settings::Kept;
use crate::texts;
use crate::types::{ncclEpGroup_t, ncclEpHandle_t, ncclResult_t};
pub use nccl_ep_abi::guard::{Guard, check_out, write_out};
use nccl_ep_abi::registry::{Names, Registry};
use nccl_ep_core::backend::nccl::Communicator;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::ops::{HandleForm, Zones};
use nccl_ep_core::session;
use std::sync::Arc;

pub static GROUPS: Registry<Group> = Registry::new(1, Names { argument: "ep_group", object: "group" });
pub static HANDLES: Registry<Handle> = Registry::new(2, Names { argument: "handle", object: "handle" });

/// A group of this ABI.
pub struct Group {
    /// The core's group.
    pub session: Arc<session::group::Group>,
    /// Settings that this ABI keeps.
    pub kept: Kept,
    /// The communicator whose windows tensors may be in.
    pub comm: Communicator,
    /// Supplies the memory of handles, if the library does not.
    pub allocator: Option<Arc<Allocator>>,
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

impl Handle {
    /// LL: how many parts received rows have, and of what.
    pub fn parts(&self) -> (usize, &'static str) {
        let facts = self.group.session.facts();
        match self.layout {
            Layout::RankMajor => (facts.ranks, "ranks"),
            _ => (facts.local_experts(), "local experts"),
        }
    }
}

/// The supported layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// LL, by expert.
    ExpertMajor,
    /// LL, by source rank.
    RankMajor,
    /// HT, one row for all experts of a rank.
    Flat,
    /// HT, by expert in zones aligned to this number of rows.
    Zones(usize),
}

impl Layout {
    /// The form of the core's handles: this ABI does not pass the ids again, and they may have 32 bits.
    pub fn form(self, kept: &Kept) -> HandleForm {
        let zones = match self {
            Self::Zones(alignment) => Some(Zones { alignment, most_slots: kept.recv_rows.filter(|_| kept.drops) }),
            _ => None,
        };
        let most_rows = kept.recv_rows.filter(|_| kept.drops && self == Self::Flat);
        HandleForm { keeps_ids: true, zones, most_rows }
    }
}

/// Runs the body of each exported function.
pub const GUARD: Guard = Guard(texts::text);

/// Runs the body of a function that works on this group.
pub fn on_group(name: &'static str, group: ncclEpGroup_t, body: impl FnOnce(Arc<Group>) -> Result<()>) -> ncclResult_t {
    GUARD.on(name, (&GROUPS, group as usize), |it| &it.session, body)
}

/// Runs the body of a function that works on this handle.
pub fn on_handle(
    name: &'static str,
    handle: ncclEpHandle_t,
    body: impl FnOnce(Arc<Handle>) -> Result<()>,
) -> ncclResult_t {
    GUARD.on(name, (&HANDLES, handle as usize), |it| &it.group.session, body)
}

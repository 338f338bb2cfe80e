//! The objects behind the numbers that C holds, those numbers, and the guard around every exported function.

use crate::owners::{Allocator, Freeing};
use crate::texts;
use crate::types::{ncclEpGroup_t, ncclEpHandle_t, ncclResult_t};
pub use nccl_ep_abi::guard::{Guard, check_out, last_error, set_last_error, write_out};
use nccl_ep_abi::registry::{Missing, Names, Registry};
use nccl_ep_core::error::Result;
use nccl_ep_core::model::tensor::DevPtr;
use nccl_ep_core::session;
use nccl_ep_core::session::handle::Handle;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;

pub static GROUPS: Registry<Group> = Registry::new(1, Names { argument: "ep_group", object: "group" });
pub static HANDLES: Registry<Handle> = Registry::new(2, Names { argument: "handle", object: "handle" });

/// Allocators of destroyed groups, which still free those groups' tensors.
static FREEING: Mutex<Freeing<Allocator>> = Mutex::new(Freeing::EMPTY);

/// What the library had allocated for the callers of destroyed groups, by the groups' numbers: descriptors that point
/// there own nothing.
static ENDED: Mutex<Vec<(usize, Range<u64>)>> = Mutex::new(Vec::new());

/// A group of this ABI.
pub struct Group {
    pub session: Arc<session::group::Group>,
    pub allocator: Arc<Allocator>,
}

impl Group {
    pub fn register(session: session::group::Group, allocator: Arc<Allocator>) -> usize {
        let group = Self { session: Arc::new(session), allocator: Arc::clone(&allocator) };
        let mut freeing = FREEING.lock();
        let number = GROUPS.insert(Arc::new(group));
        freeing.note(number, allocator.frees_by(), &allocator);
        number
    }

    /// The allocator of the live or destroyed group `number`.
    pub fn allocator_of(number: usize) -> Option<Arc<Allocator>> {
        match GROUPS.find(number) {
            Ok(group) => Some(Arc::clone(&group.allocator)),
            Err(Missing::Destroyed) => FREEING.lock().find(number),
            Err(_) => None,
        }
    }

    /// Takes group `number` away, which is about to end.
    pub fn end(number: usize) -> Result<Arc<Self>> {
        let group = GROUPS.remove(number)?;
        let owned = group.session.owned().into_iter().map(|range| (number, range));
        ENDED.lock().extend(owned);
        Ok(group)
    }

    /// Whether `data` points to memory that the library allocated for the live or destroyed group `number`.
    pub fn owns(number: usize, data: DevPtr) -> bool {
        let contains = |range: &Range<u64>| range.contains(&(data.0 as u64));
        match GROUPS.find(number) {
            Ok(group) => group.session.owned().iter().any(contains),
            Err(Missing::Destroyed) => ENDED.lock().iter().any(|(of, range)| *of == number && contains(range)),
            Err(_) => false,
        }
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
    GUARD.on(name, (&HANDLES, handle as usize), |it| it.group(), body)
}

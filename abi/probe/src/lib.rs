//! Functions for tests only (`c_tests/suites/transport`), never installed: the transport between nodes without a group.
//!
//! The tests' header `transport.h` documents functions and fields. Callers vouch for pointers: they are valid, or NULL
//! where a text refuses that; objects are alive and not used after their end; memory outlives the operations that use
//! it.
#![allow(unsafe_code, missing_docs, clippy::missing_safety_doc)]

use nccl_ep_core::backend::bootstrap::Bootstrap;
use nccl_ep_core::backend::nccl::Communicator;
use nccl_ep_core::backend::net::OnFault;
use nccl_ep_core::backend::net::two_sided::open::{Wanted, over_nccl};
use nccl_ep_core::backend::net::two_sided::{Label, Message, Transport};
use nccl_ep_core::backend::select;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::ids::GroupRank;
use nccl_ep_core::model::node_view::NodeView;
use nccl_ep_core::model::ops::Stream;
use nccl_ep_core::model::tensor::DevPtr;
use nccl_ep_core::model::topology::{NODE_ID_BYTES, NodeId, Topology};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

/// Most blocks of NCCL's kernels.
const BLOCKS: usize = 4;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct EpProbeMessage {
    pub peer: usize,
    pub data: *mut c_void,
    pub bytes: usize,
}

/// The label of all operations.
const LABEL: Label = Label { what: "probe", number: 16 };

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn answer(outcome: Result<()>) -> c_int {
    let Err(error) = outcome else { return 0 };
    let text = CString::new(error.text()).unwrap_or_default();
    LAST.with_borrow_mut(|last| *last = text);
    error.code() as c_int
}

#[unsafe(no_mangle)]
pub extern "C" fn epProbeText() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

/// Counts failures.
struct Count(Arc<AtomicI32>);

impl OnFault for Count {
    fn failed(&self, _error: &Error) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn mark(&self) {}
    fn has_failed(&self) -> bool {
        false
    }
}

pub struct EpProbeRail {
    transport: Box<dyn Transport>,
    view: Arc<NodeView>,
    faults: Arc<AtomicI32>,
}

fn open(comm: *mut c_void, node: Option<&CStr>, timeout: Duration, stream: Stream) -> Result<EpProbeRail> {
    let comm = Communicator::open(comm as usize)?;
    let platform = select::platform(&comm)?;
    let bootstrap = Bootstrap::new(comm, platform.device(), timeout, Error::text);
    let null = || Error::new(Code::InvalidArgument, "no node");
    let node = node.ok_or_else(null);
    let mine = node.map(|node| NodeId::from_text(&node.to_string_lossy()).0.to_vec());
    let ids = bootstrap.agree(mine, NODE_ID_BYTES, stream)?;
    let id = |bytes: &Vec<u8>| bytes.as_slice().try_into().map(NodeId);
    let ids: std::result::Result<Vec<NodeId>, _> = ids.iter().map(id).collect();
    let topology = Topology::from_ids(&ids.map_err(|_| Error::internal("a short node id"))?);
    let view = Arc::new(NodeView::new(topology, bootstrap.rank()));
    let faults = Arc::new(AtomicI32::new(0));
    let count = Arc::clone(&faults);
    let wanted = Wanted {
        view: &view,
        timeout,
        most_blocks: BLOCKS,
        most_bytes: usize::MAX,
        on_fault: Arc::new(Count(count)),
        new_replay_marks: &|places| platform.new_replay_marks(places),
    };
    Ok(EpProbeRail { transport: over_nccl(&bootstrap, wanted, stream)?, view, faults })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeRailOpen(
    rail: *mut *mut EpProbeRail,
    comm: *mut c_void,
    node: *const c_char,
    timeout_ms: c_uint,
    stream: *mut c_void,
) -> c_int {
    let is_string = !node.is_null();
    // SAFETY: the caller's promise.
    let (rail, node) = unsafe { (rail.as_mut(), is_string.then(|| CStr::from_ptr(node))) };
    let opened = open(comm, node, Duration::from_millis(timeout_ms.into()), Stream(stream as usize));
    answer(opened.and_then(|opened| {
        let null = || Error::new(Code::InvalidArgument, "no place for a rail");
        *rail.ok_or_else(null)? = Box::into_raw(Box::new(opened));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeRailClose(rail: *mut EpProbeRail) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(rail) });
}

/// Writes at most `most` of `ranks` to `to`; returns how many there are.
///
/// # Safety
/// `to` is valid for so many numbers.
unsafe fn write(ranks: &[GroupRank], to: *mut usize, most: usize) -> usize {
    for (index, &rank) in ranks.iter().enumerate().take(most) {
        // SAFETY: the index is below `most`.
        unsafe { *to.add(index) = rank.index() };
    }
    ranks.len()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeRailPeers(rail: *const EpProbeRail, ranks: *mut usize, most: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        let rail = &*rail;
        write(&rail.view.rail_peers, ranks, most)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeRailForwarded(rail: *const EpProbeRail, ranks: *mut usize, most: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        let rail = &*rail;
        write(rail.view.forwarded(), ranks, most)
    }
}

/// # Safety
/// `messages` is valid for `count` of them.
unsafe fn read(messages: *const EpProbeMessage, count: usize) -> Vec<Message> {
    let read = |index| {
        // SAFETY: the index is below `count`.
        let message = unsafe { *messages.add(index) };
        Message { peer: GroupRank::new(message.peer), data: DevPtr(message.data as usize), bytes: message.bytes }
    };
    (0..count).map(read).collect()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeRailExchange(
    rail: *const EpProbeRail,
    sends: *const EpProbeMessage,
    num_sends: usize,
    receives: *const EpProbeMessage,
    num_receives: usize,
    stream: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    let (rail, sends, receives) = unsafe { (&*rail, read(sends, num_sends), read(receives, num_receives)) };
    answer(rail.transport.exchange(LABEL, &sends, &receives, Stream(stream as usize)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeRailHealth(rail: *const EpProbeRail) -> c_int {
    // SAFETY: the caller's promise.
    let health = unsafe { (*rail).transport.health() };
    answer(health.map_or(Ok(()), Err))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeRailFaults(rail: *const EpProbeRail) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { (*rail).faults.load(Ordering::SeqCst) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeRailAbort(rail: *const EpProbeRail) {
    // SAFETY: the caller's promise.
    unsafe { (*rail).transport.abort() };
}

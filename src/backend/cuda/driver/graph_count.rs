//! How many captured operations a graph still has.
//!
//! A graph, and all that is made of it, shares the ownership of what it is given when it is captured. The driver lets
//! go of that once they are destroyed and their launches have run, in a thread of its own.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{check, functions};
use crate::backend::cuda::driver::stream::graph_of;
use crate::error::Result;
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Nobody waits for the driver to let go.
const NO_SYNC: c_uint = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
/// The graph takes the one reference over.
const MOVE: c_uint = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;

/// A count of captured operations, each of which counts until its graphs are gone.
#[derive(Debug, Default)]
pub struct GraphCount(Arc<AtomicUsize>);

impl GraphCount {
    /// Counts an operation in the graph that `stream` is captured into. A capture that has become invalid has none; the
    /// next launch says so.
    pub fn add(&self, stream: Stream) -> Result<()> {
        let Some(graph) = graph_of(stream)? else { return Ok(()) };
        let driver = functions()?;
        let mut object = null_mut();
        // If a call fails, it is not known what the graph has, so it counts for ever.
        self.0.fetch_add(1, Ordering::SeqCst);
        let count = Arc::into_raw(Arc::clone(&self.0)) as *mut c_void;
        // SAFETY: writes one handle; `count` is a reference that `let_go` drops.
        check("cuUserObjectCreate", unsafe {
            (driver.cuUserObjectCreate)(&mut object, count, Some(let_go), 1, NO_SYNC)
        })?;
        // SAFETY: the graph is under construction and the object has one reference, which is given away.
        check("cuGraphRetainUserObject", unsafe { (driver.cuGraphRetainUserObject)(graph, object, 1, MOVE) })
    }

    /// Whether a graph has any of them.
    pub fn has_any(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

unsafe extern "C" fn let_go(count: *mut c_void) {
    // SAFETY: from `add`, once for each call.
    let count = unsafe { Arc::from_raw(count as *const AtomicUsize) };
    count.fetch_sub(1, Ordering::SeqCst);
}

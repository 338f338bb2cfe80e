//! The communicators that C holds handles of.

use std::ffi::c_void;
use std::sync::Arc;

use super::comm::Comm;
use super::error::{Failure, Outcome};
use crate::handles::Handles;

pub type ncclComm_t = *mut c_void;

static COMMS: Handles<Comm> = Handles::new(0x5300_0000_0000);

/// Makes a communicator known to C.
pub(crate) fn publish(comm: Comm) -> ncclComm_t {
    COMMS.insert(Arc::new(comm)) as ncclComm_t
}

pub(crate) fn find(comm: ncclComm_t) -> Outcome<Arc<Comm>> {
    COMMS.get(comm as usize).ok_or_else(|| Failure::argument("comm is NULL, destroyed, or no communicator"))
}

pub(crate) fn remove(comm: ncclComm_t) {
    COMMS.remove(comm as usize);
}

//! Entry points of `ncclSend` and `ncclRecv`.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use super::boundary;
use super::collective::{check_buffer, rank_argument};
use super::comm::{find, ncclComm_t};
use super::datatype::DataType;
use super::error::{Outcome, ncclResult_t};
use super::group::{self, Task};
use super::transfer::{Direction, Transfer};
use crate::cuda::stream::{cudaStream_t, resolve_on};

/// Sends to a peer, which must receive as much.
///
/// # Safety
/// The buffer stays allocated until the stream has passed the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    buffer: *const c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let part = Part {
        call: "ncclSend",
        direction: Direction::Send,
        buffer: buffer as usize,
    };
    boundary(|| part.run(count, datatype, peer, comm, stream))
}

/// Receives from a peer, which must send as much.
///
/// # Safety
/// The buffer stays allocated until the stream has passed the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    buffer: *mut c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let part = Part {
        call: "ncclRecv",
        direction: Direction::Receive,
        buffer: buffer as usize,
    };
    boundary(|| part.run(count, datatype, peer, comm, stream))
}

/// What distinguishes a send from a receive.
struct Part {
    call: &'static str,
    direction: Direction,
    buffer: usize,
}

impl Part {
    fn run(
        self,
        count: usize,
        datatype: c_int,
        peer: c_int,
        comm: ncclComm_t,
        stream: cudaStream_t,
    ) -> Outcome<()> {
        let comm = find(comm)?;
        let stream = resolve_on(stream, comm.device)?;
        let bytes = DataType::from_c(datatype)?.bytes(count)?;
        let peer = rank_argument("peer", peer, comm.ranks())?;
        check_buffer(self.call, "buffer", self.buffer, bytes)?;
        let transfer = Transfer {
            direction: self.direction,
            peer,
            buffer: self.buffer,
            bytes,
        };
        group::run(Task::Transfer(comm, stream, transfer))
    }
}

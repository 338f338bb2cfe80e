//! The entry points for operations, groups and ids; those for communicators are in `lifetime`. Each checks its
//! arguments and calls the modules below.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};

use super::boundary::{boundary, check_buffer, read_rank, store};
use super::collective::{Collective, Kind};
use super::comm::find;
pub use super::comm::ncclComm_t;
use super::datatype::DataType;
use super::error::{self, Failure, Outcome, ncclResult_t};
use super::group::{self, Task};
pub use super::lifetime::*;
use super::transfer::{Direction, Transfer};
use super::unique_id::Rendezvous;
pub use super::unique_id::ncclUniqueId;
use crate::cuda::stream::{cudaStream_t, resolve_on};

/// The NCCL version that the stand-ins report.
const NCCL_VERSION: c_int = 22809;
/// `ncclSum`, the only reduction that programs use.
const SUM: c_int = 0;

// SAFETY (this and every other export of this module): the name is NCCL's, and this library defines it once.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetVersion(version: Option<&mut c_int>) -> ncclResult_t {
    boundary(|| store(version, NCCL_VERSION))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: ncclResult_t) -> *const c_char {
    let text = match result {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or a peer did not take part in time",
        7 => c"operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// The text of the communicator's failure, or else of the calling thread's last failure. Valid until the thread's next
/// NCCL call.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(comm: ncclComm_t) -> *const c_char {
    match find(comm).map(|comm| comm.health()) {
        Ok(Err(failure)) => error::keep(&failure.text),
        _ => error::last(),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetUniqueId(id: Option<&mut ncclUniqueId>) -> ncclResult_t {
    boundary(|| {
        let id = id.ok_or_else(|| Failure::argument("uniqueId is NULL"))?;
        *id = Rendezvous::create()?.encode();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> ncclResult_t {
    boundary(|| {
        group::start();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> ncclResult_t {
    boundary(group::end)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    boundary(|| collect(|_| Ok(Kind::AllGather), (send, recv), (count, datatype), comm, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: c_int,
    operator: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    boundary(|| {
        let kind = |datatype: DataType| {
            let sum = datatype.sum().filter(|_| operator == SUM).map(Kind::AllReduce);
            sum.ok_or_else(|| Failure::argument("the stand-ins reduce by ncclSum only, and numbers of 32 or 64 bits"))
        };
        collect(kind, (send, recv), (count, datatype), comm, stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: c_int,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    boundary(|| {
        let kind = Kind::Broadcast(read_rank("root", root, find(comm)?.ranks())?);
        collect(|_| Ok(kind), (send, recv), (count, datatype), comm, stream)
    })
}

/// Checks a collective's communicator, stream and buffers, and enqueues it.
fn collect(
    kind_of: impl FnOnce(DataType) -> Outcome<Kind>,
    (send, recv): (*const c_void, *mut c_void),
    (count, datatype): (usize, c_int),
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Outcome<()> {
    let datatype = DataType::from_c(datatype)?;
    let kind = kind_of(datatype)?;
    let comm = find(comm)?;
    let stream = resolve_on(stream, comm.device)?;
    let collective = Collective { kind, send: send as usize, recv: recv as usize, count, datatype };
    let parts = match kind {
        Kind::AllGather => comm.ranks(),
        Kind::AllReduce(_) | Kind::Broadcast(_) => 1,
    };
    let sent = datatype.bytes(count)?;
    let received = datatype.bytes(count.saturating_mul(parts))?;
    if !matches!(kind, Kind::Broadcast(root) if root != comm.rank) {
        check_buffer(kind.name(), "sendbuff", collective.send, sent)?;
    }
    check_buffer(kind.name(), "recvbuff", collective.recv, received)?;
    group::run(Task::Collective(comm, stream, collective))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    buffer: *const c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    boundary(|| transfer(Direction::Send, buffer as usize, (count, datatype), peer, comm, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    buffer: *mut c_void,
    count: usize,
    datatype: c_int,
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    boundary(|| transfer(Direction::Receive, buffer as usize, (count, datatype), peer, comm, stream))
}

/// Checks a send or a receive, and enqueues it.
fn transfer(
    direction: Direction,
    buffer: usize,
    (count, datatype): (usize, c_int),
    peer: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> Outcome<()> {
    let bytes = DataType::from_c(datatype)?.bytes(count)?;
    let comm = find(comm)?;
    let stream = resolve_on(stream, comm.device)?;
    let peer = read_rank("peer", peer, comm.ranks())?;
    check_buffer(direction.call(), "buffer", buffer, bytes)?;
    group::run(Task::Transfer(comm, stream, Transfer { direction, peer, buffer, bytes }))
}

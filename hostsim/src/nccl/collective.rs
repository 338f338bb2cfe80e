//! Entry points of the collectives: they check the arguments and put the operation into a stream.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use super::boundary;
use super::comm::{Comm, find, ncclComm_t};
use super::datatype::{DataType, Operator};
use super::error::{Failure, Outcome, ncclResult_t};
use super::group::{self, Task};
use super::operation::{Collective, Kind};
use crate::cuda::heap::{self, Range};
use crate::cuda::stream::{cudaStream_t, resolve_on};

/// The arguments that all collectives share, as they come from C.
struct Call {
    kind: Kind,
    send: usize,
    recv: usize,
    count: usize,
    datatype: c_int,
    operator: c_int,
    root: c_int,
}

/// The first operator and the first root, where the function has none.
const NONE: c_int = 0;

impl Call {
    fn run(self, comm: ncclComm_t, stream: cudaStream_t) -> Outcome<()> {
        let comm = find(comm)?;
        let stream = resolve_on(stream, comm.device)?;
        let collective = self.check(&comm)?;
        group::run(Task::Collective(comm, stream, collective))
    }

    fn check(&self, comm: &Comm) -> Outcome<Collective> {
        let datatype = DataType::from_c(self.datatype)?;
        let operator = Operator::from_c(self.operator)?;
        let ranks = comm.ranks();
        let root = rank_argument("root", self.root, ranks)?;
        let name = self.kind.name();
        let (sends, receives, sent, received) = match self.kind {
            Kind::AllGather => (true, true, 1, ranks),
            Kind::ReduceScatter => (true, true, ranks, 1),
            Kind::AllReduce => (true, true, 1, 1),
            Kind::Broadcast => (comm.rank == root, true, 1, 1),
            Kind::Reduce => (true, comm.rank == root, 1, 1),
        };
        let whole = |parts: usize| datatype.bytes(self.count.saturating_mul(parts));
        if sends {
            check_buffer(name, "sendbuff", self.send, whole(sent)?)?;
        }
        if receives {
            check_buffer(name, "recvbuff", self.recv, whole(received)?)?;
        }
        Ok(Collective {
            kind: self.kind,
            send: self.send,
            recv: self.recv,
            count: self.count,
            datatype,
            operator,
            root,
        })
    }
}

/// Refuses memory that a GPU could not reach: only device and pinned memory will do.
pub(crate) fn check_buffer(call: &str, name: &str, address: usize, bytes: usize) -> Outcome<()> {
    if bytes == 0 {
        return Ok(());
    }
    let problem = match heap::classify(address, bytes) {
        Range::Inside(_) => return Ok(()),
        Range::Pageable => "is neither device nor pinned host memory",
        Range::Invalid => "leaves its allocation or lies in freed memory",
    };
    Err(Failure::argument(format!(
        "{call}: {name} {address:#x} ({bytes} bytes) {problem}"
    )))
}

/// Reads an argument that names a rank.
pub(crate) fn rank_argument(name: &str, value: c_int, ranks: usize) -> Outcome<usize> {
    usize::try_from(value)
        .ok()
        .filter(|rank| *rank < ranks)
        .ok_or_else(|| Failure::argument(format!("{name} must be below {ranks} (got {value})")))
}

/// Every rank receives what every rank sends, in rank order.
///
/// # Safety
/// The buffers stay allocated until the stream has passed the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let (send, recv) = (send as usize, recv as usize);
    let kind = Kind::AllGather;
    let call = Call {
        kind,
        send,
        recv,
        count,
        datatype,
        operator: NONE,
        root: NONE,
    };
    boundary(|| call.run(comm, stream))
}

/// Every rank receives the reduction over all ranks.
///
/// # Safety
/// The buffers stay allocated until the stream has passed the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: c_int,
    operator: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let (send, recv) = (send as usize, recv as usize);
    let call = Call {
        kind: Kind::AllReduce,
        send,
        recv,
        count,
        datatype,
        operator,
        root: NONE,
    };
    boundary(|| call.run(comm, stream))
}

/// Each rank receives its part of the reduction over all ranks.
///
/// # Safety
/// The buffers stay allocated until the stream has passed the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: c_int,
    operator: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let (send, recv) = (send as usize, recv as usize);
    let kind = Kind::ReduceScatter;
    let call = Call {
        kind,
        send,
        recv,
        count,
        datatype,
        operator,
        root: NONE,
    };
    boundary(|| call.run(comm, stream))
}

/// Every rank receives what the root sends.
///
/// # Safety
/// The buffers stay allocated until the stream has passed the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: c_int,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let (send, recv) = (send as usize, recv as usize);
    let call = Call {
        kind: Kind::Broadcast,
        send,
        recv,
        count,
        datatype,
        operator: NONE,
        root,
    };
    boundary(|| call.run(comm, stream))
}

/// `ncclBroadcast` in place.
///
/// # Safety
/// The buffer stays allocated until the stream has passed the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBcast(
    buffer: *mut c_void,
    count: usize,
    datatype: c_int,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    // SAFETY: the same contract.
    unsafe { ncclBroadcast(buffer, buffer, count, datatype, root, comm, stream) }
}

/// The root receives the reduction over all ranks.
///
/// # Safety
/// The buffers stay allocated until the stream has passed the operation.
#[unsafe(no_mangle)]
// The list is NCCL's.
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn ncclReduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: c_int,
    operator: c_int,
    root: c_int,
    comm: ncclComm_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let (send, recv) = (send as usize, recv as usize);
    let call = Call {
        kind: Kind::Reduce,
        send,
        recv,
        count,
        datatype,
        operator,
        root,
    };
    boundary(|| call.run(comm, stream))
}

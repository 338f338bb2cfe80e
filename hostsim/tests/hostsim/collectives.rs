//! Collectives, over processes and over threads, and what NCCL calls refuse.

use std::ffi::c_int;
use std::ptr::null_mut;

use ncclep_hostsim::cuda::stream::cudaDeviceSynchronize;
use ncclep_hostsim::nccl::api::*;

use crate::kit::*;

const BF16: c_int = 9;
const MAX: c_int = 2;
/// More than one slot of the segment, and a multiple of nothing convenient.
const LARGE: usize = (1 << 20) / 4 + 333;

#[test]
fn collectives_work_over_processes() {
    for ranks in [1, 2, 3, 8] {
        run_also_late(ranks, |me| {
            check_collectives(me);
        });
    }
}

#[test]
fn collectives_work_over_threads_of_one_process() {
    let id = new_id();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            scope.spawn(move || check_collectives(Rank::join(id, rank, 4)));
        }
    });
}

fn check_collectives(me: Rank) {
    let (mut rank, mut ranks, mut device) = (-1, -1, -1);
    assert_eq!(ncclCommUserRank(me.comm, Some(&mut rank)), SUCCESS);
    assert_eq!(ncclCommCount(me.comm, Some(&mut ranks)), SUCCESS);
    assert_eq!(ncclCommCuDevice(me.comm, Some(&mut device)), SUCCESS);
    assert_eq!((rank as usize, ranks as usize, device), (me.rank, me.ranks, rank));
    // With many ranks on few cores the large ones take long and show nothing new.
    let large = if me.ranks < 8 { LARGE } else { 2000 };
    for count in [1, 1000, large] {
        gather(&me, count);
        reduce_all(&me, count);
        broadcast(&me, count);
    }
    two_streams(&me);
    empty(&me);
    me.end();
}

fn gather(me: &Rank, count: usize) {
    let send = floats(count, |i| value(me.rank, i));
    let recv = Buffer::new(4 * count * me.ranks);
    assert_eq!(ncclAllGather(send.address, recv.address, count, FLOAT, me.comm, me.stream.0), SUCCESS);
    assert_eq!(me.stream.synchronize(), SUCCESS);
    check(&recv, |i| value(i / count, i % count));
}

fn reduce_all(me: &Rank, count: usize) {
    let own = || floats(count, |i| value(me.rank, i));
    let (in_place, send, recv) = (own(), own(), Buffer::new(4 * count));
    let (comm, stream) = (me.comm, me.stream.0);
    for (from, to) in [(&in_place, &in_place), (&send, &recv)] {
        assert_eq!(ncclAllReduce(from.address, to.address, count, FLOAT, SUM, comm, stream), SUCCESS);
    }
    assert_eq!(me.stream.synchronize(), SUCCESS);
    for sums in [&in_place, &recv] {
        check(sums, |i| (0..me.ranks).map(|rank| value(rank, i)).sum());
    }
}

/// From each rank, some in place.
fn broadcast(me: &Rank, count: usize) {
    let own = floats(count, |i| value(me.rank, i));
    let (comm, stream) = (me.comm, me.stream.0);
    let received: Vec<Buffer> = (0..me.ranks).map(|_| Buffer::new(4 * count)).collect();
    for (root, buffer) in received.iter().enumerate() {
        let in_place = root == me.rank && root % 2 == 1;
        let to = if in_place { &own } else { buffer };
        let from = match root == me.rank {
            true => own.address,
            false => null_mut(),
        };
        assert_eq!(ncclBroadcast(from, to.address, count, FLOAT, root as c_int, comm, stream), SUCCESS);
    }
    assert_eq!(me.stream.synchronize(), SUCCESS);
    for (root, buffer) in received.iter().enumerate() {
        if root != me.rank || root % 2 == 0 {
            check(buffer, |i| value(root, i));
        }
    }
}

/// Operations of one communicator share its slots, so they must not overlap even if their streams do not wait for each
/// other.
fn two_streams(me: &Rank) {
    const ROUNDS: usize = 20;
    let streams = [Stream::with_flags(1), Stream::with_flags(1)];
    let sends: Vec<Buffer> = (0..ROUNDS).map(|round| floats(500, |i| value(me.rank, i + round))).collect();
    let recvs: Vec<Buffer> = (0..ROUNDS).map(|_| Buffer::new(2000 * me.ranks)).collect();
    assert_eq!(cudaDeviceSynchronize(), SUCCESS);
    for (round, (send, recv)) in sends.iter().zip(&recvs).enumerate() {
        let stream = streams[round % 2].0;
        assert_eq!(ncclAllGather(send.address, recv.address, 500, FLOAT, me.comm, stream), SUCCESS);
    }
    for stream in &streams {
        assert_eq!(stream.synchronize(), SUCCESS);
    }
    for (round, recv) in recvs.iter().enumerate() {
        check(recv, |i| value(i / 500, i % 500 + round));
    }
}

fn empty(me: &Rank) {
    assert_eq!(ncclAllGather(null_mut(), null_mut(), 0, UINT8, me.comm, me.stream.0), SUCCESS);
    assert_eq!(me.stream.synchronize(), SUCCESS);
}

#[test]
fn wrong_arguments_are_refused() {
    own_device();
    let mut me = null_mut();
    // SAFETY: the pointer is valid for a write.
    let code = unsafe { ncclCommInitRank(&raw mut me, 1, new_id(), 0) };
    assert_eq!(code, SUCCESS);
    let buffer = Buffer::new(64);
    let both = buffer.address;
    let mut local = [0u8; 64];
    let host = local.as_mut_ptr().cast();
    let none = null_mut();
    assert_eq!(ncclAllGather(both, both, 65, UINT8, me, none), INVALID_ARGUMENT);
    assert_eq!(ncclAllGather(host, both, 64, UINT8, me, none), INVALID_ARGUMENT);
    assert_eq!(ncclAllGather(both, null_mut(), 64, UINT8, me, none), INVALID_ARGUMENT);
    assert_eq!(ncclAllGather(both, both, 64, 99, me, none), INVALID_ARGUMENT);
    assert_eq!(ncclAllGather(both, both, usize::MAX, FLOAT, me, none), INVALID_ARGUMENT);
    assert_eq!(ncclAllReduce(both, both, 1, FLOAT, MAX, me, none), INVALID_ARGUMENT);
    assert_eq!(ncclAllReduce(both, both, 1, BF16, SUM, me, none), INVALID_ARGUMENT);
    assert_eq!(ncclSend(both, 1, FLOAT, -1, me, none), INVALID_ARGUMENT);
    assert_eq!(ncclAllGather(both, both, 64, UINT8, me, 0x999 as _), 1, "no such stream");
    // A refused call spoils its group, and nothing else.
    assert_eq!(ncclGroupStart(), SUCCESS);
    assert_eq!(ncclSend(both, 1, FLOAT, 7, me, none), INVALID_ARGUMENT);
    assert_eq!(ncclGroupEnd(), INVALID_ARGUMENT);
    assert_eq!(ncclAllGather(both, both, 64, UINT8, me, none), SUCCESS);
    assert_eq!(ncclGroupEnd(), INVALID_USAGE);
    assert_eq!(ncclCommDestroy(me), SUCCESS);
    assert_eq!(ncclCommDestroy(me), INVALID_ARGUMENT);
}

#[test]
fn wrong_ways_to_join_are_refused() {
    own_device();
    let mut comm = null_mut();
    // SAFETY: the pointer is valid for a write.
    let mut join = |ranks, id, rank| unsafe { ncclCommInitRank(&raw mut comm, ranks, id, rank) };
    let id = new_id();
    assert_eq!(join(0, id, 0), INVALID_ARGUMENT);
    assert_eq!(join(2, id, 2), INVALID_ARGUMENT);
    assert_eq!(join(2, id, -1), INVALID_ARGUMENT);
    let foreign = ncclUniqueId { internal: [7; 128] };
    assert_eq!(join(1, foreign, 0), INVALID_ARGUMENT);
    assert_eq!(join(1, id, 0), SUCCESS);
    assert_eq!(join(1, id, 0), INVALID_USAGE, "an id serves once");
}

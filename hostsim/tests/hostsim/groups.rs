//! Splits, sends and receives, and groups of calls.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use ncclep_hostsim::nccl::api::*;

use crate::kit::*;

/// Even ranks in reversed order, odd ranks in order, the last rank alone without a communicator.
#[test]
fn communicators_split() {
    run_also_late(5, |me| {
        let last = me.rank == me.ranks - 1;
        let odd = me.rank % 2;
        let colour = if last { -1 } else { odd as c_int };
        let key = if odd == 1 { 0 } else { -(me.rank as c_int) };
        // Work on the parent's stream must not disturb the split, nor the split the work.
        let data = floats(1000, |i| value(me.rank, i));
        let mut part = 8 as ncclComm_t;
        // SAFETY: the pointers are valid for a write, and the buffer lives until the end.
        unsafe {
            let (both, comm) = (data.address, me.comm);
            assert_eq!(ncclAllReduce(both, both, 1000, FLOAT, SUM, comm, me.stream.0), SUCCESS);
            let config = std::ptr::null();
            assert_eq!(ncclCommSplit(comm, colour, key, &raw mut part, config), SUCCESS);
        }
        if last {
            assert!(part.is_null());
        } else {
            let members: &[usize] = if odd == 1 { &[1, 3] } else { &[2, 0] };
            let (mut rank, mut count) = (-1, -1);
            let own = Buffer::from_bytes(&[me.rank as u8]);
            let all = Buffer::new(members.len());
            assert_eq!(ncclCommUserRank(part, Some(&mut rank)), SUCCESS);
            assert_eq!(ncclCommCount(part, Some(&mut count)), SUCCESS);
            assert_eq!(ncclAllGather(own.address, all.address, 1, UINT8, part, me.stream.0), SUCCESS);
            assert_eq!(members[rank as usize], me.rank);
            assert_eq!(count as usize, members.len());
            assert_eq!(me.stream.synchronize(), SUCCESS);
            assert!(all.bytes().iter().map(|byte| usize::from(*byte)).eq(members.iter().copied()));
            assert_eq!(ncclCommDestroy(part), SUCCESS);
        }
        assert_eq!(me.stream.synchronize(), SUCCESS);
        check(&data, |i| (0..me.ranks).map(|rank| value(rank, i)).sum());
        me.end();
    });
}

/// Everyone sends to everyone, itself included: a large message, then an empty, then a small one.
/// Receives are called in the opposite order of peers, which must not matter.
#[test]
fn grouped_sends_and_receives_progress_together() {
    for ranks in [1, 2, 3, 8] {
        run_also_late(ranks, |me| {
            const SIZES: [usize; 3] = [700_001, 0, 5];
            let bytes = |from: usize, to: usize, message: usize| (from * 50 + to * 6 + message) as u8;
            let messages = |peer: usize, sending: bool| {
                SIZES.iter().enumerate().map(move |(message, size)| {
                    let sent = bytes(me.rank, peer, message);
                    Buffer::filled(*size, if sending { sent } else { 0xEE })
                })
            };
            let sends: Vec<Vec<Buffer>> = (0..me.ranks).map(|to| messages(to, true).collect()).collect();
            let recvs: Vec<Vec<Buffer>> = (0..me.ranks).map(|from| messages(from, false).collect()).collect();
            let (comm, stream) = (me.comm, me.stream.0);
            assert_eq!(ncclGroupStart(), SUCCESS);
            for (to, from) in (0..me.ranks).zip((0..me.ranks).rev()) {
                for (message, size) in SIZES.into_iter().enumerate() {
                    let (out, back) = (sends[to][message].address, recvs[from][message].address);
                    assert_eq!(ncclSend(out, size, UINT8, to as c_int, comm, stream), SUCCESS);
                    assert_eq!(ncclRecv(back, size, UINT8, from as c_int, comm, stream), SUCCESS);
                }
            }
            assert_eq!(ncclGroupEnd(), SUCCESS);
            assert_eq!(me.stream.synchronize(), SUCCESS);
            for (from, received) in recvs.iter().enumerate() {
                for (message, buffer) in received.iter().enumerate() {
                    let expected = bytes(from, me.rank, message);
                    assert!(buffer.bytes().iter().all(|byte| *byte == expected), "from {from}");
                }
            }
            drop((sends, recvs));
            me.end();
        });
    }
}

/// A rank that missed its bell would sleep until it looks for dead peers, a quarter of a second.
#[test]
fn messages_wake_those_who_wait_for_them() {
    run_also_late(2, |me| {
        const TURNS: usize = 100;
        let peer = 1 - me.rank;
        let ball = Buffer::filled(64, me.rank as u8);
        let begin = Instant::now();
        for turn in 0..TURNS {
            if turn % 2 == me.rank { me.send(&ball, 64, peer) } else { me.receive(&ball, 64, peer) }
        }
        assert_eq!(me.stream.synchronize(), SUCCESS);
        let time = begin.elapsed();
        assert!(time < Duration::from_secs(10), "{TURNS} turns took {time:?}");
        assert_eq!(ball.bytes(), [0; 64], "rank 0 served");
        drop(ball);
        me.end();
    });
}

#[test]
fn one_thread_can_hold_several_ranks() {
    let id = new_id();
    let mut comms = [null_mut(); 3];
    assert_eq!(ncclGroupStart(), SUCCESS);
    for (rank, comm) in comms.iter_mut().enumerate() {
        // SAFETY: the pointer is valid until the end of the group.
        let code = unsafe { ncclCommInitRank(comm, 3, id, rank as c_int) };
        assert_eq!(code, SUCCESS);
    }
    assert_eq!(ncclGroupEnd(), SUCCESS);
    for (rank, comm) in comms.into_iter().enumerate() {
        let mut got = -1;
        assert_eq!(ncclCommUserRank(comm, Some(&mut got)), SUCCESS);
        assert_eq!(got, rank as c_int);
        assert_eq!(ncclCommDestroy(comm), SUCCESS);
    }
}

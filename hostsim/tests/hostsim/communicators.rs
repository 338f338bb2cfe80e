//! Communicators made with a configuration, several of them at once, and their independence.

use std::ffi::{c_int, c_uint};
use std::ptr::{null, null_mut};

use ncclep_hostsim::cuda::device::cudaSetDevice;
use ncclep_hostsim::cuda::stream::cudaDeviceSynchronize;
use ncclep_hostsim::nccl::api::*;

use crate::failures::gather;
use crate::kit::*;

/// Makes a communicator of one rank; returns the code.
fn make(config: *const ncclConfig_t) -> i32 {
    let mut comm = null_mut();
    // SAFETY: the pointers are null or valid.
    let code = unsafe { ncclCommInitRankConfig(&raw mut comm, 1, new_id(), 0, config) };
    assert_eq!(comm.is_null(), code != SUCCESS);
    if code == SUCCESS {
        assert_eq!(ncclCommDestroy(comm), SUCCESS);
    }
    code
}

#[test]
fn configurations_of_any_version_are_read() {
    own_device();
    assert_eq!(size_of::<ncclConfig_t>(), 48);
    assert_eq!(make(null()), SUCCESS);
    let plain = ncclConfig_t::default();
    assert_eq!(make(&raw const plain), SUCCESS);
    let chosen = ncclConfig_t {
        blocking: 1,
        cgaClusterSize: 0,
        minCTAs: 1,
        maxCTAs: 4,
        splitShare: 0,
        ..ncclConfig_t::default()
    };
    assert_eq!(make(&raw const chosen), SUCCESS);
    // A later version's configuration, with fields that are unknown here.
    #[repr(C)]
    struct Later(ncclConfig_t, [c_uint; 10]);
    let mut later = Later(chosen, [7; 10]);
    later.0.size = size_of::<Later>();
    assert_eq!(make((&raw const later).cast()), SUCCESS);
    // An earlier version's, which ends after `blocking`.
    let mut earlier = ncclConfig_t::default();
    (earlier.size, earlier.splitShare) = (24, 99);
    assert_eq!(make(&raw const earlier), SUCCESS);
}

#[test]
fn wrong_configurations_are_refused() {
    type Spoil = fn(&mut ncclConfig_t);
    let spoilers: [Spoil; 9] = [
        |config| config.magic = 0,
        |config| config.version = 0,
        |config| config.size = 8,
        |config| config.blocking = 0,
        |config| config.blocking = 2,
        |config| config.cgaClusterSize = -1,
        |config| config.minCTAs = 0,
        |config| (config.minCTAs, config.maxCTAs) = (5, 4),
        |config| config.splitShare = 2,
    ];
    own_device();
    for (number, spoil) in spoilers.into_iter().enumerate() {
        let mut config = ncclConfig_t::default();
        spoil(&mut config);
        assert_eq!(make(&raw const config), INVALID_ARGUMENT, "{number}");
    }
}

/// Each process is one rank of four communicators, which it creates in four threads at once, from their own ids that
/// travel by a collective, and uses at once.
#[test]
fn processes_hold_many_communicators() {
    run_also_late(2, |me| {
        const MANY: usize = 4;
        // Buffers are created and freed, and communicators destroyed, outside the threads: that synchronizes the
        // device, and so waits for messages of other threads.
        let parts = [(); MANY].map(|()| {
            let sent = Buffer::filled(1000, me.rank as u8);
            (shared_id(&me), sent, Buffer::new(1000))
        });
        assert_eq!(cudaDeviceSynchronize(), SUCCESS);
        let (rank, ranks) = (me.rank, me.ranks);
        let used = std::thread::scope(|scope| {
            let use_it = |(id, sent, got)| scope.spawn(move || use_one(id, (rank, ranks), sent, got));
            parts.map(use_it).map(|thread| thread.join().expect("no panic"))
        });
        for (made, buffers) in used {
            made.end();
            drop(buffers);
        }
        me.end();
    });
}

/// An id for all ranks, created by rank 0.
fn shared_id(me: &Rank) -> ncclUniqueId {
    let id = new_id().internal.map(|byte| byte as u8);
    let (mine, all) = (Buffer::from_bytes(&id), Buffer::new(id.len() * me.ranks));
    assert_eq!(ncclAllGather(mine.address, all.address, id.len(), UINT8, me.comm, me.stream.0), SUCCESS);
    assert_eq!(me.stream.synchronize(), SUCCESS);
    let mut shared = ncclUniqueId { internal: [0; 128] };
    for (to, from) in shared.internal.iter_mut().zip(all.bytes()) {
        *to = from as i8;
    }
    shared
}

/// Creates a communicator in the calling thread and sends around a ring; returns it and the buffers.
fn use_one(id: ncclUniqueId, (rank, ranks): (usize, usize), sent: Buffer, got: Buffer) -> (Rank, [Buffer; 2]) {
    assert_eq!(cudaSetDevice(rank as c_int), SUCCESS);
    let mut comm = null_mut();
    let config = ncclConfig_t { blocking: 1, splitShare: 0, ..ncclConfig_t::default() };
    // SAFETY: the pointers are valid.
    let code = unsafe { ncclCommInitRankConfig(&raw mut comm, ranks as c_int, id, rank as c_int, &raw const config) };
    assert_eq!(code, SUCCESS);
    let me = Rank { comm, rank, ranks, stream: Stream::with_flags(1) };
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for _ in 0..10 {
        assert_eq!(ncclGroupStart(), SUCCESS);
        me.send(&sent, 1000, next);
        me.receive(&got, 1000, previous);
        assert_eq!(ncclGroupEnd(), SUCCESS);
        assert_eq!(me.stream.synchronize(), SUCCESS);
        assert!(got.peek() == [previous as u8; 1000]);
    }
    (me, [sent, got])
}

/// Rank 0 begins a receive and an all-gather on one communicator. Rank 1 joins them only after both ranks have done the
/// same on another.
#[test]
fn communicators_do_not_wait_for_each_other() {
    run(2, &[], |first| {
        let second = first.duplicate();
        let peer = 1 - first.rank;
        let buffer = Buffer::filled(8, first.rank as u8);
        assert_eq!(cudaDeviceSynchronize(), SUCCESS);
        let mut gathered = Vec::new();
        let mut begin = |on: &Rank| {
            match on.rank {
                0 => on.receive(&buffer, 8, peer),
                _ => on.send(&buffer, 8, peer),
            }
            gathered.push(gather(on, 1000));
        };
        if first.rank == 0 {
            begin(&first);
        }
        begin(&second);
        assert_eq!(second.stream.synchronize(), SUCCESS);
        let token = Buffer::new(1);
        if first.rank == 0 {
            assert_eq!(first.stream.query(), NOT_READY);
            second.send(&token, 1, peer);
        } else {
            second.receive(&token, 1, peer);
            assert_eq!(second.stream.synchronize(), SUCCESS);
            begin(&first);
        }
        assert_eq!(first.stream.synchronize(), SUCCESS);
        assert_eq!(buffer.bytes(), [1; 8]);
        drop((buffer, gathered, token));
        second.end();
        first.end();
    });
}

//! `ncclCommAbort`: what it frees, what the other ranks see, and ranks that leave.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ncclep_hostsim::cuda::stream::cudaDeviceSynchronize;
use ncclep_hostsim::nccl::api::*;

use crate::failures::{async_error, await_failure, count, expect_failure, gather};
use crate::kit::*;

/// An address that may be sent to other threads.
#[derive(Clone, Copy)]
struct Shared(ncclComm_t);

// SAFETY: a handle, which the library looks up in any thread.
unsafe impl Send for Shared {}

impl Shared {
    fn abort(self) -> i32 {
        ncclCommAbort(self.0)
    }

    fn destroy(self) -> i32 {
        ncclCommDestroy(self.0)
    }
}

/// Runs `work` in another thread, after the calling one has had time to block.
fn later<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> std::thread::JoinHandle<T> {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        work()
    })
}

/// Rank 2 never joins the all-gather. Rank 0 aborts once a second communicator has told it that rank 1 is in it.
#[test]
fn an_abort_ends_the_operations_of_all_ranks() {
    run(3, &[], |me| {
        let news = me.duplicate();
        let buffers = (me.rank != 2).then(|| gather(&me, 10));
        let met = gather(&news, 1);
        assert_eq!(news.stream.synchronize(), SUCCESS);
        if me.rank == 0 {
            assert_eq!(me.stream.query(), NOT_READY);
            assert_eq!(ncclCommAbort(me.comm), SUCCESS);
            assert_eq!(ncclCommAbort(me.comm), INVALID_ARGUMENT, "gone");
            assert_eq!(ncclCommDestroy(me.comm), INVALID_ARGUMENT, "gone");
        }
        let expected = [SUCCESS, LAUNCH_TIMEOUT, SUCCESS][me.rank];
        assert_eq!(me.stream.synchronize(), expected);
        drop((buffers, met));
        if me.rank == 1 {
            expect_failure(me, REMOTE_ERROR);
        }
        news.end();
    });
}

/// Rank 1 joins neither all-gather. While the first is stuck, nothing can be freed.
#[test]
fn an_abort_in_a_group_frees_memory_at_the_end_of_the_group() {
    run(2, &[], |me| {
        let stuck = me.duplicate();
        if me.rank == 1 {
            await_failure(stuck.comm);
            expect_failure(me, REMOTE_ERROR);
            expect_failure(stuck, REMOTE_ERROR);
            return;
        }
        let buffers = (gather(&stuck, 10), gather(&me, 10));
        assert_eq!(ncclGroupStart(), SUCCESS);
        assert_eq!(ncclCommAbort(me.comm), SUCCESS);
        assert_eq!(me.stream.synchronize(), SUCCESS);
        assert_eq!(stuck.stream.query(), NOT_READY);
        let comm = Shared(stuck.comm);
        let is_over = Arc::new(AtomicBool::new(false));
        let aborted = Arc::clone(&is_over);
        let aborting = later(move || {
            aborted.store(true, Ordering::Release);
            comm.abort()
        });
        assert_eq!(ncclGroupEnd(), SUCCESS);
        assert!(is_over.load(Ordering::Acquire), "that waited for the device");
        assert_eq!(aborting.join().expect("no panic"), SUCCESS);
        drop(buffers);
    });
}

/// Rank 0 waits in three streams: for a message, for an all-gather behind it, and, by way of the
/// null stream's order, for both. Another thread aborts. Rank 1 waits for what rank 0 never sends.
#[test]
fn an_abort_in_another_thread_frees_all_streams() {
    let begin = Instant::now();
    run(2, &[], |me| {
        let spare = me.duplicate();
        let buffer = Buffer::filled(8, 1);
        me.receive(&buffer, 8, 1 - me.rank);
        if me.rank == 1 {
            assert_eq!(me.stream.synchronize(), LAUNCH_TIMEOUT);
            drop(buffer);
            expect_failure(me, REMOTE_ERROR);
        } else {
            let passed = Arc::new(AtomicBool::new(false));
            let seen = Arc::clone(&passed);
            launch(me.stream.0, move || seen.store(true, Ordering::Release));
            let second = Stream::with_flags(1);
            let others = Rank { stream: second, comm: me.comm, ..me };
            let gathered = gather(&others, 10);
            let comm = Shared(me.comm);
            let aborting = later(move || comm.abort());
            assert_eq!(me.stream.synchronize(), SUCCESS);
            assert!(passed.load(Ordering::Acquire), "what was behind it ran");
            assert_eq!(others.stream.synchronize(), SUCCESS);
            assert_eq!(aborting.join().expect("no panic"), SUCCESS);
            assert_eq!(buffer.bytes(), [1; 8], "nothing came");
            drop((buffer, gathered));
        }
        // Other communicators and streams of the process are unaffected.
        drop(gather(&spare, 10));
        spare.end();
    });
    assert!(begin.elapsed() < Duration::from_secs(15), "nobody timed out");
}

/// Rank 0 is in a split that rank 1 never joins, and then in a destruction that waits for a message.
#[test]
fn an_abort_frees_calls_on_the_host() {
    let begin = Instant::now();
    run(2, &[], |me| {
        let (blocked, spare) = (me.duplicate(), me.duplicate());
        if me.rank == 0 {
            let comm = Shared(me.comm);
            let aborting = later(move || comm.abort());
            let mut part = std::ptr::null_mut();
            // SAFETY: the pointer is valid for a write.
            let code = unsafe { ncclCommSplit(me.comm, 0, 0, &raw mut part, std::ptr::null()) };
            assert_eq!(code, REMOTE_ERROR);
            assert!(part.is_null());
            assert_eq!(aborting.join().expect("no panic"), SUCCESS);

            let buffer = Buffer::new(8);
            blocked.receive(&buffer, 8, 1);
            let comm = Shared(blocked.comm);
            let aborting = later(move || comm.abort());
            let destroyed = Shared(blocked.comm).destroy();
            assert_eq!(destroyed, SUCCESS);
            // Whichever of the two comes last finds the communicator gone.
            assert_eq!(aborting.join().expect("no panic"), SUCCESS);
        } else {
            await_failure(blocked.comm);
            assert_eq!(async_error(blocked.comm), REMOTE_ERROR);
            blocked.end();
            me.end();
        }
        drop(gather(&spare, 10));
        spare.end();
    });
    assert!(begin.elapsed() < Duration::from_secs(15), "nobody timed out");
}

/// Rank 0 calls an all-gather that rank 1 never does, until another thread aborts.
#[test]
fn a_first_operation_that_connects_waits_in_its_call() {
    let begin = Instant::now();
    run(2, &[("NCCLEP_HOSTSIM_CONNECT_SECONDS", "50")], |me| {
        let spare = me.duplicate();
        if me.rank == 0 {
            let comm = Shared(me.comm);
            let aborting = later(move || comm.abort());
            let (send, recv) = (Buffer::filled(1, 1), Buffer::new(2));
            let (to, stream) = (recv.address, me.stream.0);
            let code = ncclAllGather(send.address, to, 1, UINT8, me.comm, stream);
            assert_eq!(code, REMOTE_ERROR);
            assert_eq!(aborting.join().expect("no panic"), SUCCESS);
        } else {
            me.end();
        }
        drop(gather(&spare, 10));
        spare.end();
    });
    assert!(begin.elapsed() < Duration::from_secs(15), "nobody timed out");
}

/// Rank 1 has nothing to do and aborts one communicator, rank 2 destroys the other: the messages that they sent before
/// arrive, and those that they never send fail.
#[test]
fn a_rank_that_has_left_is_not_waited_for() {
    let begin = Instant::now();
    let said = run(3, &[], |me| {
        let aborted = me.duplicate();
        for (leaver, part) in [(1, &aborted), (2, &me)] {
            let buffer = Buffer::filled(8, me.rank as u8);
            assert_eq!(cudaDeviceSynchronize(), SUCCESS);
            if me.rank == leaver {
                part.send(&buffer, 8, 0);
                assert_eq!(part.stream.synchronize(), SUCCESS);
                let code = match leaver {
                    1 => ncclCommAbort(part.comm),
                    _ => ncclCommDestroy(part.comm),
                };
                assert_eq!(code, SUCCESS);
            } else if me.rank == 0 {
                part.receive(&buffer, 8, leaver);
                let missing = Buffer::new(8);
                part.receive(&missing, 8, leaver);
                assert_eq!(part.stream.synchronize(), LAUNCH_TIMEOUT);
                assert_eq!(buffer.bytes(), [leaver as u8; 8]);
                assert_eq!(async_error(part.comm), REMOTE_ERROR);
            }
        }
        for (leaver, part) in [(1, aborted), (2, me)] {
            if part.rank != leaver {
                assert_eq!(ncclCommDestroy(part.comm), SUCCESS);
            }
        }
    });
    assert!(begin.elapsed() < Duration::from_secs(15), "nobody timed out");
    assert_eq!(count(&said, "rank 1 has left the communicator"), 1, "{said}");
    assert_eq!(count(&said, "rank 2 has left the communicator"), 1, "{said}");
}

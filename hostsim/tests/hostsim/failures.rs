//! Ranks that stay away, die or disagree: nobody hangs, and somebody says why.

use std::ffi::CStr;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use ncclep_hostsim::nccl::api::*;

use crate::kit::*;

pub(crate) const BRIEFLY: (&str, &str) = ("NCCLEP_HOSTSIM_HANG_SECONDS", "2");

/// An all-gather of `count` bytes per rank, not waited for.
pub(crate) fn gather(me: &Rank, count: usize) -> (Buffer, Buffer) {
    let (send, recv) = (Buffer::filled(count, 1), Buffer::new(count * me.ranks));
    assert_eq!(ncclAllGather(send.address, recv.address, count, UINT8, me.comm, me.stream.0), SUCCESS);
    (send, recv)
}

pub(crate) fn async_error(comm: ncclComm_t) -> i32 {
    let mut code = -1;
    let answered = ncclCommGetAsyncError(comm, Some(&mut code));
    assert_eq!(answered, SUCCESS);
    code
}

/// Waits until the communicator has failed.
pub(crate) fn await_failure(comm: ncclComm_t) {
    let begin = Instant::now();
    while async_error(comm) == SUCCESS {
        assert!(begin.elapsed() < Duration::from_secs(25), "no failure");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Checks that the communicator has failed, says why, refuses more work, and can be destroyed.
pub(crate) fn expect_failure(me: Rank, code: i32) {
    assert_eq!(async_error(me.comm), code);
    // SAFETY: the function returns a C string.
    assert!(!unsafe { CStr::from_ptr(ncclGetLastError(me.comm)) }.is_empty());
    let buffer = Buffer::new(me.ranks);
    let refused = ncclAllGather(buffer.address, buffer.address, 1, UINT8, me.comm, me.stream.0);
    assert_eq!(refused, code);
    me.end();
}

/// The lines of a text that contain a phrase.
pub(crate) fn count(text: &str, phrase: &str) -> usize {
    text.lines().filter(|line| line.contains(phrase)).count()
}

#[test]
fn a_hang_is_detected_and_explained_once() {
    let said = run(3, &[BRIEFLY], |me| {
        assert_eq!(async_error(me.comm), SUCCESS);
        if me.rank == 2 {
            // Present, but not taking part.
            await_failure(me.comm);
        } else {
            let buffers = gather(&me, 10);
            assert_eq!(me.stream.synchronize(), LAUNCH_TIMEOUT);
            assert_eq!(me.stream.synchronize(), SUCCESS, "the error is told once");
            drop(buffers);
        }
        expect_failure(me, REMOTE_ERROR);
    });
    assert_eq!(count(&said, "ncclAllGather waited 2."), 1, "{said}");
    assert_eq!(count(&said, "not arrived: rank 2 of 3"), 1, "{said}");
    assert_eq!(count(&said, "hostsim:"), 1, "{said}");
}

#[test]
fn a_dead_rank_is_noticed_long_before_the_limit() {
    let begin = Instant::now();
    let outputs = finish(start(3, &[], || {
        let me = Rank::from_environment();
        if me.rank == 1 {
            std::process::exit(42);
        }
        let buffers = gather(&me, 10);
        assert_eq!(me.stream.synchronize(), LAUNCH_TIMEOUT);
        drop(buffers);
        expect_failure(me, REMOTE_ERROR);
    }));
    assert!(begin.elapsed() < Duration::from_secs(10));
    let said: String = outputs.iter().map(|output| String::from_utf8_lossy(&output.stderr)).collect();
    assert_eq!(outputs[1].status.code(), Some(42));
    assert!(has_done(&outputs[0]) && has_done(&outputs[2]), "{said}");
    assert_eq!(count(&said, "process of rank 1 has gone"), 1, "{said}");
    let leftovers = std::fs::read_dir("/dev/shm").map_or(0, |entries| {
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.ok().map(|e| e.file_name());
        entries.filter_map(name).filter(|n| n.to_string_lossy().contains("ncclep")).count()
    });
    assert_eq!(leftovers, 0);
}

#[test]
fn calls_that_do_not_match_are_reported() {
    let said = run(3, &[], |me| {
        let buffers = gather(&me, if me.rank == 1 { 20 } else { 10 });
        assert_eq!(me.stream.synchronize(), LAUNCH_FAILURE);
        drop(buffers);
        expect_failure(me, INVALID_USAGE);
    });
    assert_eq!(count(&said, "does not match"), 1, "{said}");
    assert_eq!(count(&said, "count is"), 1, "{said}");
}

#[test]
fn a_rank_that_never_joins_is_named() {
    let said = processes(2, &[BRIEFLY], || {
        let (rank, ranks) = seat();
        if rank == 1 {
            return;
        }
        let mut comm = null_mut();
        // SAFETY: the pointer is valid for a write.
        let code = unsafe { ncclCommInitRank(&raw mut comm, ranks as i32, id(), rank as i32) };
        assert_eq!(code, REMOTE_ERROR);
        assert!(comm.is_null());
    });
    assert_eq!(count(&said, "ncclCommInitRank waited 2."), 1, "{said}");
    assert_eq!(count(&said, "not arrived: rank 1 of 2"), 1, "{said}");
}

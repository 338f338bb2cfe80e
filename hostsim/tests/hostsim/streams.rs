//! Order within and between streams, the legacy default stream, events.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use ncclep_hostsim::cuda::device::cudaSetDevice;
use ncclep_hostsim::cuda::error::cudaGetLastError;
use ncclep_hostsim::cuda::event::*;
use ncclep_hostsim::cuda::memory::{cudaFree, cudaMalloc};
use ncclep_hostsim::cuda::reset::cudaDeviceReset;
use ncclep_hostsim::cuda::stream::*;
use ncclep_hostsim::nccl::api::{ncclAllGather, ncclComm_t};

use crate::kit::*;

const INVALID_HANDLE: i32 = 400;
const NOT_PERMITTED: i32 = 800;
const NON_BLOCKING: u32 = 1;
/// `cudaStreamLegacy` as an explicit handle.
const LEGACY: cudaStream_t = 1 as cudaStream_t;

/// Long enough for a worker to do what it must not do.
fn give_a_chance() {
    std::thread::sleep(Duration::from_millis(30));
}

/// A journal that work in streams writes.
#[derive(Clone, Default)]
struct Journal(Arc<Mutex<Vec<&'static str>>>);

impl Journal {
    fn note(&self, stream: cudaStream_t, entry: &'static str) {
        let journal = self.clone();
        launch(stream, move || journal.0.lock().expect("no panic").push(entry));
    }

    fn read(&self) -> Vec<&'static str> {
        self.0.lock().expect("no panic").clone()
    }
}

#[test]
fn work_is_asynchronous_and_in_order() {
    own_device();
    let stream = Stream::new();
    let journal = Journal::default();
    let gate = Gate::holding(stream.0);
    journal.note(stream.0, "first");
    journal.note(stream.0, "second");
    give_a_chance();
    assert!(journal.read().is_empty(), "nothing runs before the gate opens");
    assert_eq!(cudaStreamQuery(stream.0), NOT_READY);
    assert_eq!(cudaGetLastError(), NOT_READY);
    gate.open();
    assert_eq!(stream.synchronize(), SUCCESS);
    assert_eq!(journal.read(), ["first", "second"]);
    assert_eq!(cudaStreamQuery(stream.0), SUCCESS);
}

#[test]
fn a_blocked_stream_does_not_hold_up_another() {
    own_device();
    let (blocked, free) = (Stream::new(), Stream::new());
    let gate = Gate::holding(blocked.0);
    let journal = Journal::default();
    journal.note(free.0, "free");
    assert_eq!(free.synchronize(), SUCCESS);
    assert_eq!(journal.read(), ["free"]);
    gate.open();
}

#[test]
fn legacy_work_waits_for_blocking_streams_and_they_for_it() {
    own_device();
    let (one, two) = (Stream::new(), Stream::new());
    let journal = Journal::default();
    let gate = Gate::holding(one.0);
    journal.note(one.0, "one");
    journal.note(null_mut(), "legacy");
    journal.note(two.0, "two");
    give_a_chance();
    assert!(journal.read().is_empty());
    gate.open();
    assert_eq!(two.synchronize(), SUCCESS);
    assert_eq!(journal.read(), ["one", "legacy", "two"]);
}

#[test]
fn non_blocking_streams_are_exempt_from_the_legacy_order() {
    own_device();
    let exempt = Stream::with_flags(NON_BLOCKING);
    let journal = Journal::default();
    let gate = Gate::holding(exempt.0);
    journal.note(LEGACY, "legacy");
    assert_eq!(cudaStreamSynchronize(null_mut()), SUCCESS);
    assert_eq!(journal.read(), ["legacy"]);
    gate.open();
    let gate = Gate::holding(null_mut());
    journal.note(exempt.0, "exempt");
    assert_eq!(exempt.synchronize(), SUCCESS);
    assert_eq!(journal.read(), ["legacy", "exempt"]);
    gate.open();
}

#[test]
fn synchronizing_the_default_stream_covers_blocking_streams() {
    own_device();
    let stream = Stream::new();
    let journal = Journal::default();
    launch(stream.0, || std::thread::sleep(Duration::from_millis(20)));
    journal.note(stream.0, "done");
    assert_eq!(cudaStreamSynchronize(null_mut()), SUCCESS);
    assert_eq!(journal.read(), ["done"]);
}

#[test]
fn streams_wait_for_events() {
    own_device();
    let (first, second) = (Stream::with_flags(NON_BLOCKING), Stream::with_flags(NON_BLOCKING));
    let journal = Journal::default();
    let mark = event();
    assert_eq!(cudaEventQuery(mark), SUCCESS, "never recorded means passed");
    assert_eq!(cudaStreamWaitEvent(second.0, mark, 0), SUCCESS);
    let gate = Gate::holding(first.0);
    journal.note(first.0, "first");
    assert_eq!(cudaEventRecord(mark, first.0), SUCCESS);
    assert_eq!(cudaStreamWaitEvent(second.0, mark, 0), SUCCESS);
    journal.note(second.0, "second");
    assert_eq!(cudaEventQuery(mark), NOT_READY);
    // A wait already submitted survives the event.
    assert_eq!(cudaEventDestroy(mark), SUCCESS);
    give_a_chance();
    assert!(journal.read().is_empty());
    gate.open();
    assert_eq!(second.synchronize(), SUCCESS);
    assert_eq!(journal.read(), ["first", "second"]);
    assert_eq!(cudaEventQuery(mark), INVALID_HANDLE);
}

#[test]
fn events_measure_time() {
    own_device();
    let stream = Stream::new();
    let (start, end) = (event(), event());
    let mut elapsed = 0.0;
    let mut measure = || {
        let code = cudaEventElapsedTime(Some(&mut elapsed), start, end);
        (code, elapsed)
    };
    assert_eq!(measure().0, INVALID_HANDLE, "not recorded");
    assert_eq!(cudaEventRecord(start, stream.0), SUCCESS);
    assert_eq!(cudaEventSynchronize(start), SUCCESS);
    let gate = Gate::holding(stream.0);
    assert_eq!(cudaEventRecord(end, stream.0), SUCCESS);
    assert_eq!(measure().0, NOT_READY);
    std::thread::sleep(Duration::from_millis(15));
    gate.open();
    assert_eq!(cudaEventSynchronize(end), SUCCESS);
    let (code, milliseconds) = measure();
    assert_eq!(code, SUCCESS);
    assert!((15.0..5000.0).contains(&milliseconds), "{milliseconds} ms");
}

#[test]
fn untimed_events_have_no_time() {
    own_device();
    let mut mark = null_mut();
    let mut elapsed = 0.0;
    assert_eq!(cudaEventCreateWithFlags(Some(&mut mark), 2), SUCCESS);
    assert_eq!(cudaEventRecord(mark, null_mut()), SUCCESS);
    assert_eq!(cudaEventSynchronize(mark), SUCCESS);
    assert_eq!(cudaEventElapsedTime(Some(&mut elapsed), mark, mark), INVALID_HANDLE);
    assert_eq!(cudaEventCreateWithFlags(Some(&mut mark), 64), 1);
}

#[test]
fn freeing_waits_for_the_device() {
    own_device();
    let stream = Stream::with_flags(NON_BLOCKING);
    let buffer = Buffer::new(64);
    let address = buffer.address as usize;
    let gate = Gate::holding(stream.0);
    let last = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&last);
    launch(stream.0, move || {
        // SAFETY: the buffer lives until its free, which waits for this.
        seen.store(unsafe { (address as *const u32).read() }, Ordering::SeqCst);
    });
    std::thread::spawn(move || {
        give_a_chance();
        gate.open();
    });
    drop(buffer);
    assert_eq!(last.load(Ordering::SeqCst), 0xCBCB_CBCB);
}

#[test]
fn host_functions_may_not_call_back() {
    own_device();
    let stream = Stream::new();
    let answers: Arc<[AtomicI32; 3]> = Arc::default();
    let inside = Arc::clone(&answers);
    launch(stream.0, move || {
        let answer = |index: usize, code| inside[index].store(code, Ordering::SeqCst);
        answer(0, cudaDeviceSynchronize());
        answer(1, cudaStreamSynchronize(null_mut()));
        let work: cudaHostFn_t = None;
        // SAFETY: no function is passed.
        answer(2, unsafe { cudaLaunchHostFunc(null_mut(), work, null_mut()) });
    });
    assert_eq!(stream.synchronize(), SUCCESS);
    let answers: Vec<i32> = answers.iter().map(|code| code.load(Ordering::SeqCst)).collect();
    assert_eq!(answers, [NOT_PERMITTED, NOT_PERMITTED, 1]);
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    own_device();
    let journal = Journal::default();
    let stream = Stream::new();
    let raw = stream.0;
    let gate = Gate::holding(raw);
    journal.note(raw, "late");
    drop(stream);
    assert_eq!(cudaStreamSynchronize(raw), INVALID_HANDLE);
    assert_eq!(cudaStreamDestroy(null_mut()), INVALID_HANDLE, "default streams stay");
    gate.open();
    assert_eq!(cudaDeviceSynchronize(), SUCCESS);
    assert_eq!(journal.read(), ["late"]);
}

/// In a separate process, because other tests use the same devices.
#[test]
fn a_device_can_be_reset() {
    processes(1, &[], || {
        let (stream, mark) = (Stream::new(), event());
        let address = Buffer::new(16).address;
        let mut kept = null_mut();
        assert_eq!(cudaMalloc(Some(&mut kept), 16), SUCCESS);
        assert_eq!(cudaFree(address), 1, "freed before");
        assert_eq!(cudaSetDevice(1), SUCCESS);
        let other = Buffer::filled(16, 9);
        assert_eq!(cudaSetDevice(0), SUCCESS);
        let journal = Journal::default();
        launch(stream.0, || std::thread::sleep(Duration::from_millis(20)));
        journal.note(stream.0, "done");
        assert_eq!(cudaDeviceReset(), SUCCESS);
        assert_eq!(journal.read(), ["done"]);
        assert_eq!(cudaFree(kept), 1, "gone with the reset");
        assert_eq!(cudaStreamSynchronize(stream.0), INVALID_HANDLE);
        assert_eq!(cudaEventQuery(mark), INVALID_HANDLE);
        std::mem::forget(stream);
        // The device is usable again, and so are the others.
        assert_eq!(Buffer::filled(16, 7).bytes(), [7; 16]);
        assert_eq!(cudaSetDevice(1), SUCCESS);
        assert_eq!(other.bytes(), [9; 16]);
        drop(other);
        assert_eq!(cudaDeviceReset(), SUCCESS);
    });
}

/// As in CUDA, which does not survive a fork: no call waits for a thread that the child lacks.
#[test]
fn a_forked_process_is_refused() {
    const INITIALIZATION_ERROR: i32 = 3;
    own_device();
    let stream = Stream::new();
    // SAFETY: the child makes one call, which takes no lock and allocates no memory, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = stream.synchronize();
        // SAFETY: ends the process without the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: the pointer is valid for a write.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status));
    assert_eq!(libc::WEXITSTATUS(status), INITIALIZATION_ERROR);
    assert_eq!(stream.synchronize(), SUCCESS);
}

/// With room for one: what waits for room gets it once the work in front begins, which here lasts until then.
#[test]
fn work_that_begins_leaves_room() {
    processes(1, &[("NCCLEP_HOSTSIM_QUEUE", "1")], || {
        let stream = Stream::new();
        for _ in 0..100 {
            let gate = Gate::holding(stream.0);
            let (has_room, room) = mpsc::channel();
            launch(stream.0, move || room.recv_timeout(Duration::from_secs(5)).expect("room"));
            let address = stream.0 as usize;
            let next = std::thread::spawn(move || {
                launch(address as cudaStream_t, || ());
                has_room.send(()).expect("somebody waits");
            });
            std::thread::sleep(Duration::from_millis(1));
            gate.open();
            next.join().expect("no panic");
            assert_eq!(stream.synchronize(), SUCCESS);
        }
    });
}

/// It would wait for itself.
#[test]
fn a_host_function_that_calls_back_beside_a_free_is_refused() {
    run(1, &[], |me| {
        let (buffer, both) = (Buffer::new(64), Buffer::new(64));
        let (address, comm, stream) = (both.address as usize, me.comm as usize, me.stream.0 as usize);
        let refused = Arc::new(AtomicI32::new(-1));
        let inside = Arc::clone(&refused);
        launch(me.stream.0, move || {
            give_a_chance();
            let (both, stream) = (address as *mut c_void, stream as cudaStream_t);
            inside.store(ncclAllGather(both, both, 64, UINT8, comm as ncclComm_t, stream), Ordering::SeqCst);
        });
        drop(buffer);
        assert_eq!(refused.load(Ordering::SeqCst), UNHANDLED_CUDA_ERROR);
        drop(both);
        me.end();
    });
}

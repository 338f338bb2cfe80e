//! Captures and graphs: order, replays with new data, and the calls that a capture forbids. Each test is a separate
//! process, as a capture is affected by the calls of all threads.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ncclep_hostsim::cuda::capture::*;
use ncclep_hostsim::cuda::copy::cudaMemsetAsync;
use ncclep_hostsim::cuda::event::*;
use ncclep_hostsim::cuda::stream::*;

use crate::kit::*;

const ILLEGAL_STATE: i32 = 401;
const UNSUPPORTED: i32 = 900;
const INVALIDATED: i32 = 901;
const MERGE: i32 = 902;
const UNMATCHED: i32 = 903;
const UNJOINED: i32 = 904;
const ISOLATION: i32 = 905;
const IMPLICIT: i32 = 906;
const CAPTURED_EVENT: i32 = 907;
const WRONG_THREAD: i32 = 908;

const GLOBAL: c_int = 0;
const THREAD_LOCAL: c_int = 1;
const RELAXED: c_int = 2;

#[test]
fn replays() {
    processes(1, &[], || {
        ncclEpHostsimAllowGraphs();
        lanes_keep_their_order();
        a_graph_owns_what_it_is_given();
        rules_of_captures();
        the_end_of_a_communicator(Rank::from_environment());
    });
}

/// Orders further work of `to` after the present work of `from`.
fn follow(to: &Stream, from: &Stream) -> i32 {
    let event = event();
    assert_eq!(cudaEventRecord(event, from.0), SUCCESS);
    let code = cudaStreamWaitEvent(to.0, event, 0);
    assert_eq!(cudaEventDestroy(event), SUCCESS);
    code
}

fn begin(stream: &Stream, mode: c_int) {
    assert_eq!(cudaStreamBeginCapture(stream.0, mode), SUCCESS);
}

fn end(stream: &Stream) -> (i32, cudaGraph_t) {
    let mut graph = 8 as cudaGraph_t;
    let code = cudaStreamEndCapture(stream.0, Some(&mut graph));
    (code, graph)
}

/// Ends a capture and instantiates its graph.
fn executable(stream: &Stream) -> cudaGraphExec_t {
    let (code, graph) = end(stream);
    assert_eq!(code, SUCCESS);
    let mut executable = null_mut();
    let made = cudaGraphInstantiate(Some(&mut executable), graph, 0);
    assert_eq!((made, cudaGraphDestroy(graph)), (SUCCESS, SUCCESS));
    executable
}

/// Whether the stream is captured, by CUDA's number.
fn status(stream: &Stream) -> c_int {
    let mut status = -1;
    assert_eq!(cudaStreamIsCapturing(stream.0, Some(&mut status)), SUCCESS);
    status
}

static SOURCE: AtomicU32 = AtomicU32::new(0);
static MIDDLE: AtomicU32 = AtomicU32::new(0);
static TARGET: AtomicU32 = AtomicU32::new(0);
static RUNS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn to_middle(_: *mut c_void) {
    std::thread::sleep(Duration::from_millis(2));
    MIDDLE.store(SOURCE.load(Ordering::Relaxed), Ordering::Relaxed);
    RUNS.fetch_add(1, Ordering::Relaxed);
}

unsafe extern "C" fn to_target(_: *mut c_void) {
    TARGET.store(MIDDLE.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Returns once the other lane's work has run, so the lanes must run concurrently.
unsafe extern "C" fn wait_for_other_lane(_: *mut c_void) {
    while RUNS.load(Ordering::Relaxed) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

static RELEASED: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn released(_: *mut c_void) {
    RELEASED.fetch_add(1, Ordering::Relaxed);
}

/// Until the graph and what was made from it are destroyed; a failed capture owns nothing.
fn a_graph_owns_what_it_is_given() {
    let stream = Stream::new();
    let give = || {
        begin(&stream, THREAD_LOCAL);
        let (mut status, mut number) = (0, 0);
        // SAFETY: the pointers are valid for writes; the function takes any argument.
        unsafe {
            let asked = ncclEpHostsimCapture(stream.0, Some(&mut status), Some(&mut number));
            let given = ncclEpHostsimGiveToCapture(number, Some(released), null_mut());
            assert_eq!((asked, status, given), (SUCCESS, 1, SUCCESS));
        }
    };
    give();
    let executable = executable(&stream);
    assert_eq!(RELEASED.load(Ordering::Relaxed), 0);
    assert_eq!(cudaGraphExecDestroy(executable), SUCCESS);
    assert_eq!(RELEASED.load(Ordering::Relaxed), 1);
    give();
    assert_eq!(stream.synchronize(), UNSUPPORTED);
    assert_eq!(end(&stream).0, INVALIDATED);
    assert_eq!(RELEASED.load(Ordering::Relaxed), 2);
    // SAFETY: the function takes any argument.
    let unknown = unsafe { ncclEpHostsimGiveToCapture(999, Some(released), null_mut()) };
    assert_eq!((unknown, RELEASED.load(Ordering::Relaxed)), (1, 2));
}

/// Work that passes from lane to lane arrives in every replay, and lanes without order run concurrently.
fn lanes_keep_their_order() {
    let (origin, branch) = (Stream::new(), Stream::with_flags(1));
    begin(&origin, THREAD_LOCAL);
    assert_eq!((status(&origin), status(&branch)), (1, 0));
    assert_eq!(follow(&branch, &origin), SUCCESS);
    assert_eq!(status(&branch), 1);
    // SAFETY: the functions take any argument.
    unsafe {
        let nothing = null_mut();
        assert_eq!(cudaLaunchHostFunc(origin.0, Some(wait_for_other_lane), nothing), SUCCESS);
        assert_eq!(cudaLaunchHostFunc(branch.0, Some(to_middle), nothing), SUCCESS);
        assert_eq!(follow(&origin, &branch), SUCCESS);
        assert_eq!(cudaLaunchHostFunc(origin.0, Some(to_target), nothing), SUCCESS);
    }
    assert_eq!(RUNS.load(Ordering::Relaxed), 0, "nothing runs while it is captured");
    let graph = executable(&origin);
    assert_eq!((status(&origin), status(&branch)), (0, 0));
    for value in 1..=5 {
        SOURCE.store(value, Ordering::Relaxed);
        assert_eq!(cudaGraphLaunch(graph, origin.0), SUCCESS);
        assert_eq!(origin.synchronize(), SUCCESS);
        assert_eq!(TARGET.load(Ordering::Relaxed), value);
    }
    // Launches on two streams do not overlap.
    for stream in [&origin, &branch, &origin] {
        assert_eq!(cudaGraphLaunch(graph, stream.0), SUCCESS);
    }
    assert_eq!(cudaGraphExecDestroy(graph), SUCCESS);
    assert_eq!((origin.synchronize(), branch.synchronize()), (SUCCESS, SUCCESS));
    assert_eq!(RUNS.load(Ordering::Relaxed), 8);
    assert_ne!(cudaGraphLaunch(graph, origin.0), SUCCESS);
}

/// A call that breaks a rule, given a captured stream and another one; and what it must return.
type Mistake = (fn(&Stream, &Stream) -> i32, i32);

const MISTAKES: &[Mistake] = &[
    (|captured, _| captured.synchronize(), UNSUPPORTED),
    (|captured, _| captured.query(), UNSUPPORTED),
    (|_, other| other.synchronize(), UNSUPPORTED),
    (|_, _| cudaDeviceSynchronize(), UNSUPPORTED),
    (|captured, other| follow(captured, other), ISOLATION),
    (|captured, _| wait_for_marked(captured), CAPTURED_EVENT),
    (|captured, other| merge(captured, other), MERGE),
    (|_, _| allocate(), UNSUPPORTED),
];

fn wait_for_marked(captured: &Stream) -> i32 {
    let event = event();
    assert_eq!(cudaEventRecord(event, captured.0), SUCCESS);
    let apart = exchange(RELAXED);
    let code = cudaEventQuery(event);
    exchange(apart);
    code
}

fn merge(captured: &Stream, other: &Stream) -> i32 {
    begin(other, THREAD_LOCAL);
    let code = follow(captured, other);
    assert_eq!(end(other).0, SUCCESS);
    code
}

fn allocate() -> i32 {
    let mut address = null_mut();
    ncclep_hostsim::cuda::memory::cudaMalloc(Some(&mut address), 64)
}

fn exchange(mode: c_int) -> c_int {
    let mut mode = mode;
    assert_eq!(cudaThreadExchangeStreamCaptureMode(Some(&mut mode)), SUCCESS);
    mode
}

fn rules_of_captures() {
    let memory = Buffer::new(64);
    let (captured, other) = (Stream::with_flags(1), Stream::with_flags(1));
    for (number, (mistake, code)) in MISTAKES.iter().enumerate() {
        begin(&captured, THREAD_LOCAL);
        assert_eq!(mistake(&captured, &other), *code, "mistake {number}");
        assert_eq!(status(&captured), 2, "mistake {number}");
        assert_eq!(cudaMemsetAsync(memory.address, 1, 64, captured.0), INVALIDATED);
        assert_eq!(end(&captured), (INVALIDATED, null_mut()), "mistake {number}");
    }
    the_end_is_wrong(&captured, &other, &memory);
    whose_calls_count(&captured);
    in_any_mode(&memory);
    assert_eq!(cudaStreamBeginCapture(null_mut(), RELAXED), UNSUPPORTED);
}

/// Calls that captures forbid in any mode, the relaxed one included; and a query that is always allowed.
fn in_any_mode(memory: &Buffer) {
    type Call = fn(*mut c_void) -> i32;
    let calls: [(Call, i32); 4] = [
        (|to| cudaMemsetAsync(to, 1, 64, null_mut()), IMPLICIT),
        (|_| cudaStreamQuery(null_mut()), IMPLICIT),
        (|_| ncclEpHostsimRefuseCapture(null_mut()), IMPLICIT),
        (|_| cudaDeviceSynchronize(), UNSUPPORTED),
    ];
    let blocking = Stream::new();
    let before = exchange(RELAXED);
    for (number, (call, code)) in calls.into_iter().enumerate() {
        begin(&blocking, RELAXED);
        let mut status = -1;
        assert_eq!(cudaStreamIsCapturing(null_mut(), Some(&mut status)), IMPLICIT);
        assert_eq!(ncclEpHostsimWaitForDevice(0), SUCCESS);
        assert_eq!(self::status(&blocking), 1);
        assert_eq!(call(memory.address), code, "call {number}");
        assert_eq!(end(&blocking).0, INVALIDATED, "call {number}");
    }
    exchange(before);
}

fn the_end_is_wrong(captured: &Stream, other: &Stream, memory: &Buffer) {
    begin(captured, THREAD_LOCAL);
    assert_eq!(cudaStreamBeginCapture(captured.0, RELAXED), ILLEGAL_STATE);
    assert_eq!(follow(other, captured), SUCCESS);
    assert_eq!(end(other).0, UNMATCHED);
    assert_eq!(cudaMemsetAsync(memory.address, 1, 64, other.0), SUCCESS);
    let handle = captured.0 as usize;
    let elsewhere = std::thread::spawn(move || {
        let mut graph = null_mut();
        cudaStreamEndCapture(handle as cudaStream_t, Some(&mut graph))
    });
    assert_eq!(elsewhere.join().expect("no panic"), WRONG_THREAD);
    assert_eq!(end(captured), (UNJOINED, null_mut()));
    assert_eq!((status(captured), status(other)), (0, 0));
}

/// Calls of other threads matter in the global mode only, and none of a relaxed thread matters.
fn whose_calls_count(captured: &Stream) {
    for (mode, elsewhere) in [(GLOBAL, UNSUPPORTED), (THREAD_LOCAL, SUCCESS), (RELAXED, SUCCESS)] {
        begin(captured, mode);
        let before = exchange(RELAXED);
        assert_eq!(cudaStreamQuery(null_mut()), SUCCESS);
        exchange(before);
        let other = std::thread::spawn(|| {
            exchange(RELAXED);
            let relaxed = cudaStreamQuery(null_mut());
            exchange(GLOBAL);
            (relaxed, cudaStreamQuery(null_mut()))
        });
        assert_eq!(other.join().expect("no panic"), (SUCCESS, elsewhere));
        let valid = if elsewhere == SUCCESS { SUCCESS } else { INVALIDATED };
        assert_eq!(end(captured).0, valid);
    }
}

/// Captures that other threads' calls invalidate are invalidated by NCCL's own frees, whatever the caller's mode.
fn the_end_of_a_communicator(me: Rank) {
    let captured = Stream::with_flags(1);
    begin(&captured, GLOBAL);
    let before = exchange(RELAXED);
    me.end();
    exchange(before);
    assert_eq!(end(&captured).0, INVALIDATED);
}

//! Numbers of CUDA and NCCL, safe wrappers over their functions, elements to send, and child processes.

use std::ffi::c_void;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use ncclep_hostsim::cuda::copy::{cudaMemcpy, cudaMemset};
use ncclep_hostsim::cuda::device::cudaSetDevice;
use ncclep_hostsim::cuda::event::{cudaEvent_t, cudaEventCreate};
use ncclep_hostsim::cuda::memory::{cudaFree, cudaMalloc};
use ncclep_hostsim::cuda::stream::{
    cudaLaunchHostFunc, cudaStream_t, cudaStreamCreateWithFlags, cudaStreamDestroy, cudaStreamQuery,
    cudaStreamSynchronize,
};
use ncclep_hostsim::nccl::api::{
    ncclComm_t, ncclCommDestroy, ncclCommInitRank, ncclCommSplit, ncclGetUniqueId, ncclRecv, ncclSend, ncclUniqueId,
};

pub(crate) const SUCCESS: i32 = 0;
// CUDA's.
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const LAUNCH_TIMEOUT: i32 = 702;
pub(crate) const LAUNCH_FAILURE: i32 = 719;
// NCCL's.
pub(crate) const UNHANDLED_CUDA_ERROR: i32 = 1;
pub(crate) const INVALID_ARGUMENT: i32 = 4;
pub(crate) const INVALID_USAGE: i32 = 5;
pub(crate) const REMOTE_ERROR: i32 = 6;
pub(crate) const UINT8: i32 = 1;
pub(crate) const FLOAT: i32 = 7;
pub(crate) const SUM: i32 = 0;

pub(crate) const HOST_TO_DEVICE: i32 = 1;
pub(crate) const DEVICE_TO_HOST: i32 = 2;
pub(crate) const DEVICE_TO_DEVICE: i32 = 3;

/// The exit status of a process that has done its work.
const DONE: i32 = 33;
const ID: &str = "HOSTSIM_TEST_ID";
const RANKS: &str = "HOSTSIM_TEST_RANKS";
const RANK: &str = "HOSTSIM_TEST_RANK";

/// Gives the calling test a device that no other running test uses. The first few are left to the ranks of
/// communicators.
pub(crate) fn own_device() {
    const DEVICES: std::ops::Range<i32> = 8..16;
    static NEXT: AtomicI32 = AtomicI32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    assert_eq!(cudaSetDevice(DEVICES.start + number % (DEVICES.end - DEVICES.start)), 0);
}

/// A stream, destroyed when dropped.
pub(crate) struct Stream(pub(crate) cudaStream_t);

impl Stream {
    pub(crate) fn new() -> Self {
        Self::with_flags(0)
    }

    pub(crate) fn with_flags(flags: u32) -> Self {
        let mut raw = std::ptr::null_mut();
        assert_eq!(cudaStreamCreateWithFlags(Some(&mut raw), flags), 0);
        Self(raw)
    }

    pub(crate) fn synchronize(&self) -> i32 {
        cudaStreamSynchronize(self.0)
    }

    pub(crate) fn query(&self) -> i32 {
        cudaStreamQuery(self.0)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        assert_eq!(cudaStreamDestroy(self.0), 0);
    }
}

pub(crate) fn event() -> cudaEvent_t {
    let mut event = std::ptr::null_mut();
    assert_eq!(cudaEventCreate(Some(&mut event)), SUCCESS);
    event
}

/// Runs a closure in stream order.
pub(crate) fn launch(stream: cudaStream_t, work: impl FnOnce() + Send + 'static) {
    type Work = Box<dyn FnOnce() + Send>;
    unsafe extern "C" fn call(data: *mut c_void) {
        // SAFETY: the data is the box below, handed over once.
        let work = unsafe { Box::from_raw(data.cast::<Work>()) };
        work();
    }
    let work: Box<Work> = Box::new(Box::new(work));
    // SAFETY: `call` takes the box as its data and is called once.
    let code = unsafe { cudaLaunchHostFunc(stream, Some(call), Box::into_raw(work).cast()) };
    assert_eq!(code, 0);
}

/// Blocks a stream until it is opened or dropped, so that a failed test does not hang.
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// Closes a gate in a stream.
    pub(crate) fn holding(stream: cudaStream_t) -> Self {
        let state: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let inside = Arc::clone(&state);
        launch(stream, move || {
            let closed = inside.0.lock().expect("no panic");
            drop(inside.1.wait_while(closed, |open| !*open));
        });
        Self(state)
    }

    pub(crate) fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Ok(mut open) = self.0.0.lock() {
            *open = true;
        }
        self.0.1.notify_all();
    }
}

/// Device memory, freed when dropped.
pub(crate) struct Buffer {
    pub(crate) address: *mut c_void,
    len: usize,
}

// SAFETY: an address; the memory is the runtime's and has no thread.
unsafe impl Send for Buffer {}

impl Buffer {
    pub(crate) fn new(len: usize) -> Self {
        let mut address = std::ptr::null_mut();
        assert_eq!(cudaMalloc(Some(&mut address), len), 0);
        Self { address, len }
    }

    pub(crate) fn filled(len: usize, value: u8) -> Self {
        let buffer = Self::new(len);
        assert_eq!(cudaMemset(buffer.address, i32::from(value), len), 0);
        buffer
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Self {
        let buffer = Self::new(bytes.len());
        // SAFETY: the source has the length.
        let code = unsafe { cudaMemcpy(buffer.address, bytes.as_ptr().cast(), bytes.len(), HOST_TO_DEVICE) };
        assert_eq!(code, 0);
        buffer
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: the destination has the length.
        let code = unsafe { cudaMemcpy(bytes.as_mut_ptr().cast(), self.address, self.len, DEVICE_TO_HOST) };
        assert_eq!(code, 0);
        bytes
    }

    /// The bytes as they are now, without any synchronisation.
    pub(crate) fn peek(&self) -> Vec<u8> {
        // SAFETY: device memory is readable by the host here; tests that race on purpose only
        // compare whole patterns.
        unsafe { std::slice::from_raw_parts(self.address.cast::<u8>(), self.len) }.to_vec()
    }

    pub(crate) fn floats(&self) -> Vec<f32> {
        let word = |bytes: &[u8]| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        self.bytes().chunks_exact(4).map(word).collect()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        assert_eq!(cudaFree(self.address), 0);
    }
}

/// Value of element `index` on a rank; small integers, so that sums are exact.
pub(crate) fn value(rank: usize, index: usize) -> f32 {
    ((rank * 31 + index * 7) % 100) as f32
}

/// Device memory with these elements.
pub(crate) fn floats(count: usize, value: impl Fn(usize) -> f32) -> Buffer {
    let mut bytes = vec![0; 4 * count];
    for (index, element) in bytes.chunks_exact_mut(4).enumerate() {
        element.copy_from_slice(&value(index).to_ne_bytes());
    }
    Buffer::from_bytes(&bytes)
}

/// Compares received elements with the expected ones.
pub(crate) fn check(buffer: &Buffer, expected: impl Fn(usize) -> f32) {
    let got = buffer.floats();
    let wrong = (0..got.len()).find(|index| got[*index] != expected(*index));
    if let Some(index) = wrong {
        panic!("element {index} is {}, not {}", got[index], expected(index));
    }
}

/// This rank's end of the communicator of all child processes, with a stream.
pub(crate) struct Rank {
    pub(crate) comm: ncclComm_t,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) stream: Stream,
}

// SAFETY: two handles, which the library looks up in any thread.
unsafe impl Send for Rank {}

impl Rank {
    /// Joins with what the environment of a child process says.
    pub(crate) fn from_environment() -> Self {
        let (rank, ranks) = seat();
        Self::join(id(), rank, ranks)
    }

    pub(crate) fn join(id: ncclUniqueId, rank: usize, ranks: usize) -> Self {
        assert_eq!(cudaSetDevice(rank as i32), 0);
        let mut comm = std::ptr::null_mut();
        // SAFETY: the pointer is valid for a write.
        let code = unsafe { ncclCommInitRank(&raw mut comm, ranks as i32, id, rank as i32) };
        assert_eq!(code, 0);
        Self { comm, rank, ranks, stream: Stream::new() }
    }

    /// A second communicator of the same ranks, with its own stream.
    pub(crate) fn duplicate(&self) -> Self {
        let mut comm = std::ptr::null_mut();
        let (key, config) = (self.rank as i32, std::ptr::null());
        // SAFETY: the pointer is valid for a write.
        let code = unsafe { ncclCommSplit(self.comm, 0, key, &raw mut comm, config) };
        assert_eq!(code, 0);
        Self { comm, stream: Stream::with_flags(1), ..*self }
    }

    /// Sends to a peer, in this rank's stream or at the end of the open group.
    pub(crate) fn send(&self, buffer: &Buffer, bytes: usize, peer: usize) {
        let (address, stream) = (buffer.address, self.stream.0);
        assert_eq!(ncclSend(address, bytes, UINT8, peer as i32, self.comm, stream), 0);
    }

    /// Receives from a peer, as [`Self::send`] sends.
    pub(crate) fn receive(&self, buffer: &Buffer, bytes: usize, peer: usize) {
        let (address, stream) = (buffer.address, self.stream.0);
        assert_eq!(ncclRecv(address, bytes, UINT8, peer as i32, self.comm, stream), 0);
    }

    pub(crate) fn end(self) {
        assert_eq!(self.stream.synchronize(), 0);
        assert_eq!(ncclCommDestroy(self.comm), 0);
    }
}

/// Rank and number of ranks of this child process.
pub(crate) fn seat() -> (usize, usize) {
    let number = |name| std::env::var(name).expect("set").parse().expect("a number");
    (number(RANK), number(RANKS))
}

/// The unique id that the parent created.
pub(crate) fn id() -> ncclUniqueId {
    let mut id = ncclUniqueId { internal: [0; 128] };
    for (to, from) in id.internal.iter_mut().zip(std::env::var(ID).expect("set").bytes()) {
        *to = from as i8;
    }
    id
}

pub(crate) fn new_id() -> ncclUniqueId {
    let mut id = ncclUniqueId { internal: [0; 128] };
    assert_eq!(ncclGetUniqueId(Some(&mut id)), 0);
    id
}

/// Random delays of everything.
const LATE: &[(&str, &str)] = &[("NCCLEP_HOSTSIM_DELAY_US", "300"), ("NCCLEP_HOSTSIM_DELAY_SEED", "7")];

/// The name of the test that a closure belongs to.
fn test_of<Work>(_: &Work) -> &'static str {
    let path = std::any::type_name::<Work>().trim_end_matches("::{{closure}}");
    path.split_once("::").expect("the program's name").1
}

/// Starts one process per rank, each of which runs `test` again but does only `work`.
fn start_test(test: &str, ranks: usize, settings: &[(&str, &str)], work: impl Fn()) -> Vec<Child> {
    if std::env::var(RANK).is_ok() {
        work();
        std::process::exit(DONE);
    }
    let text = new_id().internal.map(|c| c as u8);
    let text = String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned();
    let program = std::env::current_exe().expect("own path");
    let start_one = |rank: usize| {
        Command::new(&program)
            .args(["--exact", test, "--nocapture"])
            .env("NCCLEP_HOSTSIM_HANG_SECONDS", "20")
            .env("RUST_BACKTRACE", "0")
            .env(ID, &text)
            .env(RANKS, ranks.to_string())
            .env(RANK, rank.to_string())
            .envs(settings.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process")
    };
    (0..ranks).map(start_one).collect()
}

/// The same for a closure of the calling test.
pub(crate) fn start(ranks: usize, settings: &[(&str, &str)], work: impl Fn()) -> Vec<Child> {
    start_test(test_of(&work), ranks, settings, work)
}

pub(crate) fn has_done(output: &Output) -> bool {
    output.status.code() == Some(DONE)
}

/// Waits for processes and returns their output.
pub(crate) fn finish(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().expect("an end")).collect()
}

/// Waits for processes that must succeed; returns all their stderr.
fn succeed(children: Vec<Child>) -> String {
    let mut said = String::new();
    for (rank, output) in finish(children).iter().enumerate() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(has_done(output), "rank {rank}: {stderr}");
        said.push_str(&stderr);
    }
    said
}

/// As `start`, and waits for the processes.
pub(crate) fn processes(ranks: usize, settings: &[(&str, &str)], work: impl Fn()) -> String {
    succeed(start(ranks, settings, work))
}

/// The same for ranks of a communicator, without and with delays.
pub(crate) fn run_also_late(ranks: usize, work: impl Fn(Rank)) {
    let test = test_of(&work);
    for settings in [&[], LATE] {
        succeed(start_test(test, ranks, settings, || work(Rank::from_environment())));
    }
}

/// The same for ranks of a communicator.
pub(crate) fn run(ranks: usize, settings: &[(&str, &str)], work: impl Fn(Rank)) -> String {
    succeed(start_test(test_of(&work), ranks, settings, || work(Rank::from_environment())))
}

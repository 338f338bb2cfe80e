//! The functions of the CPU stand-ins (`hostsim`) that this backend calls.
//!
//! They carry the CUDA runtime's names; a marker symbol tells the stand-ins from the real runtime. "Device" memory is
//! this process's own: allocated by the stand-ins or, as PyTorch's CPU tensors, in any other way.
#![allow(unsafe_code)]

use crate::backend::device::{Device, EnteredDevice, Memory, StreamMark, may_run};
use crate::backend::dylib::{Library, function_table};
use crate::backend::host::shared_file::SharedBlock;
use crate::backend::quiescence::{Allocation, Attempt, Key, Quiescence, UnderWay, Works};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use once_cell::sync::{Lazy, OnceCell};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Arc, Weak};

/// The version of the stand-ins that this backend was written for.
const ABI: c_int = 2;
const ERROR_NOT_READY: c_int = 600;
/// `cudaMemcpyDefault`: a caller's tensors may be in plain host memory, as PyTorch's on the CPU are.
const ANY_DIRECTION: c_int = 4;

/// Calls a function of the stand-ins on the group's device; the error names it.
macro_rules! call {
    ($runtime:expr, $name:ident($($argument:expr),*)) => {
        $runtime.call(stringify!($name), |it| (it.$name)($($argument),*))
    };
}

type HostFunction = unsafe extern "C" fn(*mut c_void);

function_table! {
    /// The stand-ins' entry points.
    struct Functions;
    required {
        fn ncclEpHostsimAbi() -> c_int;
        fn cudaGetDevice(*mut c_int) -> c_int;
        fn cudaSetDevice(c_int) -> c_int;
        fn cudaMalloc(*mut *mut c_void, usize) -> c_int;
        fn cudaFree(*mut c_void) -> c_int;
        fn cudaFreeAsync(*mut c_void, *mut c_void) -> c_int;
        fn cudaMemcpyAsync(*mut c_void, *const c_void, usize, c_int, *mut c_void) -> c_int;
        fn cudaHostGetDevicePointer(*mut *mut c_void, *mut c_void, u32) -> c_int;
        fn cudaStreamCreateWithFlags(*mut *mut c_void, c_uint) -> c_int;
        fn cudaStreamDestroy(*mut c_void) -> c_int;
        fn cudaStreamSynchronize(*mut c_void) -> c_int;
        fn cudaStreamQuery(*mut c_void) -> c_int;
        fn cudaEventCreateWithFlags(*mut *mut c_void, c_uint) -> c_int;
        fn cudaEventDestroy(*mut c_void) -> c_int;
        fn cudaEventRecord(*mut c_void, *mut c_void) -> c_int;
        fn cudaEventQuery(*mut c_void) -> c_int;
        fn ncclEpHostsimForgetFailure() -> ();
        fn ncclEpHostsimBlock(*const c_void, c_int, *mut SharedBlock) -> c_int;
        fn cudaLaunchHostFunc(*mut c_void, HostFunction, *mut c_void) -> c_int;
    }
    optional {}
}

static FUNCTIONS: OnceCell<Functions> = OnceCell::new();

/// `cudaStreamNonBlocking`: not ordered with the legacy default stream.
const NON_BLOCKING: c_uint = 1;

/// Memory to be freed at a quiescent moment of this process, on all of its devices, since freeing waits for all streams
/// of a device.
static QUIESCENCE: Lazy<Arc<Quiescence>> = Lazy::new(Arc::default);

/// The stand-ins of this process, as called by a group on one of their devices. The calling thread's current device and
/// its unreported failure stay as they are.
#[derive(Clone, Copy)]
pub struct HostRuntime {
    functions: &'static Functions,
    device: c_int,
}

impl HostRuntime {
    /// The stand-ins' device with this number, if the process has them.
    pub fn detect(device: usize) -> Result<Option<Self>> {
        let device = c_int::try_from(device).unwrap_or(c_int::MAX);
        if let Some(functions) = FUNCTIONS.get() {
            return Ok(Some(Self { functions, device }));
        }
        let marker = c"ncclEpHostsimAbi";
        let library = match Library::chosen_nccl() {
            Some(chosen) => chosen.ok().filter(|nccl| nccl.has(marker)),
            None => Library::defining(marker),
        };
        let Some(library) = library else { return Ok(None) };
        let functions = FUNCTIONS.get_or_try_init(|| {
            Functions::load(&library)
                .map_err(|missing| Error::new(Code::SystemError, format!("the CPU stand-ins have no {missing}")))
        })?;
        // SAFETY: takes nothing and returns a number.
        let abi = unsafe { (functions.ncclEpHostsimAbi)() };
        if abi != ABI {
            return Err(
                Error::new(Code::InvalidUsage, "hostsim: the CPU stand-ins are of another version").got(abi, ABI)
            );
        }
        Ok(Some(Self { functions, device }))
    }

    /// The result of `call` on the group's device.
    fn ask(&self, call: impl FnOnce(&Functions) -> c_int) -> c_int {
        let code = match self.enter_device() {
            Ok(_entered) => call(self.functions),
            Err(code) => code,
        };
        if code != 0 {
            // SAFETY: takes and returns nothing.
            unsafe { (self.functions.ncclEpHostsimForgetFailure)() };
        }
        code
    }

    /// The error that names `name`, unless `call` succeeds on the group's device.
    fn call(&self, name: &str, call: impl FnOnce(&Functions) -> c_int) -> Result<()> {
        match self.ask(call) {
            0 => Ok(()),
            code => Err(failed(name, code)),
        }
    }

    /// Makes the group's device current on the calling thread until the result is dropped.
    fn enter_device(&self) -> std::result::Result<Before, c_int> {
        let (functions, mut device) = (self.functions, 0);
        // SAFETY: writes one number.
        let asked = unsafe { (functions.cudaGetDevice)(&mut device) };
        // SAFETY: any number may be given; the stand-ins refuse those that are none of theirs.
        let set = || unsafe { (functions.cudaSetDevice)(self.device) };
        match if asked == 0 { set() } else { asked } {
            0 => Ok(Before { functions, device }),
            code => Err(code),
        }
    }

    /// Runs `work` on `stream`, after everything enqueued there before.
    pub fn launch(&self, stream: Stream, work: Box<dyn FnOnce() + Send>) -> Result<()> {
        let boxed = Box::into_raw(Box::new(work)).cast::<c_void>();
        // SAFETY: `call_boxed` gets the box that it wants, once.
        let launched = unsafe { call!(self, cudaLaunchHostFunc(stream.0 as *mut c_void, call_boxed, boxed)) };
        if launched.is_err() {
            // SAFETY: the function was not enqueued, so the box is still ours.
            drop(unsafe { Box::from_raw(boxed.cast::<Box<dyn FnOnce() + Send>>()) });
        }
        launched
    }

    /// The allocation that contains `data`; its pages move into a memory file, so nobody may write there meanwhile.
    pub fn shared_block(&self, data: DevPtr) -> Result<SharedBlock> {
        let mut block = SharedBlock::default();
        // SAFETY: writes one block; the stand-ins know their allocations.
        unsafe { call!(self, ncclEpHostsimBlock(data.0 as *const c_void, 1, &mut block)) }?;
        Ok(block)
    }

    /// Whether a stream of this process has an exchange that was given up.
    pub fn is_hung(&self) -> bool {
        QUIESCENCE.is_hung()
    }

    /// Copies on a separate stream: the legacy default stream would wait for other threads' streams.
    fn copy(&self, to: *mut c_void, from: *const c_void, bytes: usize) -> Result<()> {
        let stream = self.create_stream()?;
        let raw = stream.0 as *mut c_void;
        // SAFETY: the callers' contract; the next call waits for the copy.
        let copied = unsafe { call!(self, cudaMemcpyAsync(to, from, bytes, ANY_DIRECTION, raw)) };
        // SAFETY: the stream was just made.
        let waited = unsafe { call!(self, cudaStreamSynchronize(raw)) };
        self.destroy_stream(stream);
        copied.and(waited)
    }

    fn free_now(&self, data: usize) -> Result<()> {
        // SAFETY: the stand-ins refuse an address that they did not give.
        unsafe { call!(self, cudaFree(data as *mut c_void)) }
    }

    fn free_unawaited(&self, data: usize) -> Result<()> {
        // SAFETY: the stand-ins refuse an address that they did not give; NULL is the default stream.
        unsafe { call!(self, cudaFreeAsync(data as *mut c_void, std::ptr::null_mut())) }
    }
}

fn failed(name: &str, code: c_int) -> Error {
    Error::new(Code::UnhandledCudaError, format!("{name}: CUDA error {code}"))
}

/// An event of the stand-ins.
struct Mark {
    runtime: HostRuntime,
    raw: usize,
}

impl StreamMark for Mark {
    fn record(&mut self, stream: Stream) -> Result<bool> {
        // SAFETY: our event; the stand-ins know their streams.
        let recorded =
            unsafe { call!(self.runtime, cudaEventRecord(self.raw as *mut c_void, stream.0 as *mut c_void)) };
        // There are no captures.
        recorded.map(|()| true)
    }

    fn is_over(&self) -> Result<bool> {
        // SAFETY: our event.
        let code = self.runtime.ask(|it| unsafe { (it.cudaEventQuery)(self.raw as *mut c_void) });
        Ok(code != ERROR_NOT_READY)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: our event, destroyed once.
        let _ = self.runtime.ask(|it| unsafe { (it.cudaEventDestroy)(self.raw as *mut c_void) });
    }
}

/// The thread's previous device.
struct Before {
    functions: &'static Functions,
    device: c_int,
}

impl Drop for Before {
    fn drop(&mut self) {
        // SAFETY: a number that the stand-ins gave.
        let _ = unsafe { (self.functions.cudaSetDevice)(self.device) };
    }
}

/// # Safety
/// `boxed` came from `Box::into_raw` in [`HostRuntime::launch`], and this is its only call.
unsafe extern "C" fn call_boxed(boxed: *mut c_void) {
    // SAFETY: this function's contract.
    let work = unsafe { Box::from_raw(boxed.cast::<Box<dyn FnOnce() + Send>>()) };
    // A panic must not unwind into the stand-ins; the operation's own guard reports it.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
}

impl Memory for HostRuntime {
    fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        let mut data = std::ptr::null_mut();
        // SAFETY: writes one pointer, which outlives the call.
        unsafe { call!(self, cudaMalloc(&mut data, bytes)) }?;
        Ok(DevPtr(data as usize))
    }

    fn free(&self, data: DevPtr) -> Result<()> {
        let runtime = *self;
        let freed = Arc::new(OnceCell::new());
        let outcome = Arc::clone(&freed);
        let free = move |address| drop(outcome.set(runtime.free_now(address)));
        QUIESCENCE.free_soon(Allocation {
            address: data.0,
            bytes: 0,
            free: Box::new(free),
            free_unawaited: Box::new(move |address| runtime.free_unawaited(address).is_ok()),
        });
        // An allocation that is to be freed later counts as freed.
        freed.get().cloned().unwrap_or(Ok(()))
    }

    fn alloc_own(&self, bytes: usize) -> Result<DevPtr> {
        let left = QUIESCENCE.take(&Key::Memory(bytes));
        left.map_or_else(|| self.alloc(bytes), |it| Ok(DevPtr(it.address)))
    }

    fn free_own(&self, data: DevPtr, bytes: usize) {
        let runtime = *self;
        // A failure to free memory cannot be handled.
        let free = move |address| drop(runtime.free_now(address));
        QUIESCENCE.later(Some(Key::Memory(bytes)), data.0, Some(Box::new(free)));
    }

    fn device_alias(&self, host: DevPtr) -> Result<DevPtr> {
        let mut device = std::ptr::null_mut();
        // SAFETY: writes one pointer, which outlives the call.
        unsafe { call!(self, cudaHostGetDevicePointer(&mut device, host.0 as *mut c_void, 0)) }?;
        Ok(DevPtr(device as usize))
    }

    fn upload(&self, to: DevPtr, from: &[u8]) -> Result<()> {
        self.copy(to.0 as *mut c_void, from.as_ptr().cast(), from.len())
    }

    fn download(&self, to: &mut [u8], from: DevPtr) -> Result<()> {
        self.copy(to.as_mut_ptr().cast(), from.0 as *const c_void, to.len())
    }
}

impl Device for HostRuntime {
    fn new_mark(&self) -> Result<Box<dyn StreamMark>> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(self, cudaEventCreateWithFlags(&mut raw, 0)) }?;
        Ok(Box::new(Mark { runtime: *self, raw: raw as usize }))
    }

    fn enter(&self) -> Result<EnteredDevice> {
        Ok(EnteredDevice::new(self.enter_device().map_err(|code| failed("cudaSetDevice", code))?))
    }

    fn create_stream(&self) -> Result<Stream> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { call!(self, cudaStreamCreateWithFlags(&mut stream, NON_BLOCKING)) }?;
        Ok(Stream(stream as usize))
    }

    fn destroy_stream(&self, stream: Stream) {
        // SAFETY: the stand-ins know their streams.
        let _ = self.ask(|it| unsafe { (it.cudaStreamDestroy)(stream.0 as *mut c_void) });
    }

    fn is_idle(&self, stream: Stream) -> Result<bool> {
        // SAFETY: the stand-ins know their streams.
        match self.ask(|it| unsafe { (it.cudaStreamQuery)(stream.0 as *mut c_void) }) {
            0 => Ok(true),
            ERROR_NOT_READY => Ok(false),
            code => Err(failed("cudaStreamQuery", code)),
        }
    }

    fn begin(&self) -> UnderWay {
        QUIESCENCE.begin()
    }

    fn watch_works(&self, works: Weak<dyn Works>) {
        QUIESCENCE.watch(works);
    }

    fn mark_hung(&self, mark: Option<Box<dyn StreamMark>>) {
        QUIESCENCE.mark_hung(Box::new(move || may_run(&mark)));
    }

    fn attempt(&self, work: &mut dyn FnMut()) -> Attempt {
        QUIESCENCE.attempt(work)
    }
}

//! The few NCCL functions that the library calls, in the caller's copy of NCCL: here those for the caller's
//! communicator, in `own` those for the library's own communicators.
//!
//! A communicator belongs to the copy of NCCL that created it, so a second copy must not be opened
//! (`dylib`). Result codes stay integers: a newer NCCL may have codes that we do not know.
#![allow(unsafe_code)]

pub mod network;
pub mod own;

use crate::backend::dylib::{Library, file_of, function_table, other_files_with};
use crate::error::refusal::{AmongRanks, Subject};
use crate::error::{Code, Error, Result};
use crate::model::ids::GroupRank;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// `ncclUint8`.
const UINT8: c_int = 1;
/// `ncclInProgress`, which only non-blocking communicators return.
const IN_PROGRESS: c_int = 7;

/// Bytes of an `ncclUniqueId`.
pub const ID_BYTES: usize = 128;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; ID_BYTES]);

/// `ncclConfig_t` as of NCCL 2.18. Newer versions use defaults for their additional fields.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

function_table! {
    /// NCCL's entry points; the required ones are in NCCL 2.18, that for windows is since NCCL 2.29.
    struct Functions;
    required {
        fn ncclCommCount(*mut c_void, *mut c_int) -> c_int;
        fn ncclCommUserRank(*mut c_void, *mut c_int) -> c_int;
        fn ncclCommCuDevice(*mut c_void, *mut c_int) -> c_int;
        fn ncclAllGather(*const c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void) -> c_int;
    }
    optional {
        fn ncclGetErrorString(c_int) -> *const c_char;
        fn ncclGetVersion(*mut c_int) -> c_int;
        fn ncclWinGetUserPtr(*mut c_void, *mut c_void, *mut *mut c_void) -> c_int;
    }
}

function_table! {
    /// Those for groups over several nodes.
    struct OwnFunctions;
    required {
        fn ncclGetUniqueId(*mut UniqueId) -> c_int;
        fn ncclCommInitRankConfig(*mut *mut c_void, c_int, UniqueId, c_int, *mut Config) -> c_int;
        fn ncclCommGetAsyncError(*mut c_void, *mut c_int) -> c_int;
        fn ncclCommAbort(*mut c_void) -> c_int;
        fn ncclCommDestroy(*mut c_void) -> c_int;
        fn ncclGroupStart() -> c_int;
        fn ncclGroupEnd() -> c_int;
        fn ncclSend(*const c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
        fn ncclRecv(*mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
        fn ncclBroadcast(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
    }
    optional {}
}

/// Both, or the name of the first that is missing of the second ones.
type All = (Functions, std::result::Result<OwnFunctions, &'static str>);

/// The functions, looked up once. A failure is not cached, as NCCL may be loaded later.
fn functions() -> Result<&'static All> {
    static FUNCTIONS: OnceCell<All> = OnceCell::new();
    FUNCTIONS.get_or_try_init(|| {
        let library = match Library::chosen_nccl() {
            Some(chosen) => chosen.map_err(|reason| {
                Error::new(Code::SystemError, format!("NCCL_EP_NCCL_LIBRARY: cannot be loaded: {reason}"))
            }),
            None => Library::find(c"libnccl.so.2", c"ncclAllGather")
                .map_err(|reason| Error::new(Code::SystemError, format!("no NCCL in this process: {reason}"))),
        }?;
        let functions = Functions::load(&library)
            .map_err(|missing| Error::new(Code::SystemError, format!("this process's NCCL has no {missing}")))?;
        Ok((functions, OwnFunctions::load(&library)))
    })
}

/// The caller's communicator, and the facts that NCCL reports about it.
///
/// The caller vouches for it: whoever passes an `ncclComm_t` to this library promises to keep it
/// alive until the groups made from it are destroyed. No address is checked here.
#[derive(Clone)]
pub struct Communicator {
    pub ranks: usize,
    pub rank: GroupRank,
    /// The CUDA device of this rank, by the process's numbering.
    pub device: usize,
    raw: *mut c_void,
    functions: &'static Functions,
}

// SAFETY: an `ncclComm_t` may be used from any thread, but not from two at once. NCCL leaves this
// to its callers, and this library leaves it to the callers of its collective calls.
unsafe impl Send for Communicator {}
// SAFETY: as for Send.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// The communicator at address `comm`.
    pub fn open(comm: usize) -> Result<Self> {
        if comm == 0 {
            return Err(Error::argument(Subject::Communicator, AmongRanks::NotNull));
        }
        let (functions, _) = functions()?;
        let raw = comm as *mut c_void;
        Ok(Self {
            ranks: query(functions, "ncclCommCount", functions.ncclCommCount, raw)
                .map_err(|error| among_copies(error, functions))?,
            rank: GroupRank::new(query(functions, "ncclCommUserRank", functions.ncclCommUserRank, raw)?),
            device: query(functions, "ncclCommCuDevice", functions.ncclCommCuDevice, raw)?,
            raw,
            functions,
        })
    }

    /// The version of this NCCL in NCCL's notation, `?` if unknown, and its file.
    pub fn library(&self) -> (String, String) {
        let mut number = 0;
        if let Some(get) = self.functions.ncclGetVersion {
            // SAFETY: writes one int, which outlives the call.
            unsafe { get(&mut number) };
        }
        let version = if number > 0 { dotted(number) } else { "?".to_owned() };
        (version, file(self.functions))
    }

    /// The start of this rank's memory in its window at address `window`.
    pub fn window_data(&self, window: usize) -> Result<DevPtr> {
        let Some(get) = self.functions.ncclWinGetUserPtr else {
            let text = "memory in a window without data needs NCCL 2.29 or newer";
            return Err(Error::new(Code::InvalidUsage, text));
        };
        let mut data = std::ptr::null_mut();
        // SAFETY: the communicator is alive (this type's contract), and the caller vouches for its window; writes one
        // address, which outlives the call.
        let code = unsafe { get(self.raw, window as *mut c_void, &mut data) };
        check(self.functions, "ncclWinGetUserPtr", code)?;
        Ok(DevPtr(data as usize))
    }

    /// Enqueues an all-gather: `bytes` of each rank's `send` go to `receive`, in rank order. Both
    /// buffers must stay allocated until `stream` has run it.
    pub fn all_gather(&self, send: DevPtr, receive: DevPtr, bytes: usize, stream: Stream) -> Result<()> {
        let (send, receive) = (send.0 as *const c_void, receive.0 as *mut c_void);
        let stream = stream.0 as *mut c_void;
        // SAFETY: the communicator is alive (this type's contract); the addresses are the device's.
        let code = unsafe { (self.functions.ncclAllGather)(send, receive, bytes, UINT8, self.raw, stream) };
        check(self.functions, "ncclAllGather", code)
    }
}

/// A version in NCCL's notation. Up to 2.8 NCCL encoded it differently.
fn dotted(version: c_int) -> String {
    let (major, minor) = match version {
        ..10_000 => (version / 1000, version / 100 % 10),
        _ => (version / 10_000, version / 100 % 100),
    };
    format!("{major}.{minor}.{}", version % 100)
}

/// The file that this NCCL is in.
fn file(functions: &Functions) -> String {
    file_of(functions.ncclCommCount as *const c_void).unwrap_or_else(|| "?".to_owned())
}

/// `error`, about a communicator that this NCCL does not know, with the other copies of NCCL in the process.
fn among_copies(error: Error, functions: &Functions) -> Error {
    let used = file(functions);
    let others = Vec::from_iter(other_files_with(c"ncclCommCuDevice", &used)).join(", ");
    if others.is_empty() {
        error
    } else {
        error.and(Error::new(
            Code::InvalidUsage,
            format!(
                "of several NCCLs in this process {used} is used, and a communicator of {others} is \
                 invalid there: NCCL_EP_NCCL_LIBRARY chooses"
            ),
        ))
    }
}

/// Reads one number of the communicator with `raw`.
fn query(
    functions: &Functions,
    name: &str,
    ask: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    raw: *mut c_void,
) -> Result<usize> {
    let mut answer = 0;
    // SAFETY: the caller vouches for the communicator; writes one int, which outlives the call.
    let code = unsafe { ask(raw, &mut answer) };
    check(functions, name, code)?;
    usize::try_from(answer).map_err(|_| Error::internal(format!("{name}: negative answer {answer}")))
}

/// An error with NCCL's own text for every code but success.
fn check(functions: &Functions, name: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    if code == IN_PROGRESS {
        return Err(Error::usage(Subject::Communicator, AmongRanks::Blocking));
    }
    Err(Error::new(Code::from_raw(code), format!("{name}: {}", describe(functions, code))))
}

fn describe(functions: &Functions, code: c_int) -> String {
    let Some(get) = functions.ncclGetErrorString else {
        return format!("NCCL error {code}");
    };
    // SAFETY: takes any integer and returns a string constant or NULL.
    let text = unsafe { get(code) };
    if text.is_null() {
        return format!("NCCL error {code}");
    }
    // SAFETY: a NUL-terminated constant of the library, which is never unloaded.
    let text = unsafe { CStr::from_ptr(text) };
    format!("NCCL error {code}, {}", text.to_string_lossy())
}

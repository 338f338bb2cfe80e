//! Unique ids: where the ranks of a communicator find their shared memory.
//!
//! The memory is a memfd, reached through `/proc/<pid>/fd/<fd>` of the process that asked for the id. It has no name in
//! any file system, so nothing is left behind, however a process ends, and the size limit of /dev/shm does not apply.
//! As with NCCL, that process must live until the communicator is created.

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};

use super::error::{Code, Failure, Outcome};

const BYTES: usize = 128;
const PREFIX: &str = "ncclep-hostsim";

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ncclUniqueId {
    /// Text, padded with zeros.
    pub internal: [c_char; BYTES],
}

/// The content of a unique id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rendezvous {
    process: u32,
    descriptor: i32,
    nonce: u64,
}

/// Descriptors that keep unused ids alive in this process.
static OWNED: Mutex<BTreeMap<u64, OwnedFd>> = Mutex::new(BTreeMap::new());

impl Rendezvous {
    /// Creates memory of size zero, owned by this process.
    pub(crate) fn create() -> Outcome<Self> {
        let process = std::process::id();
        let nonce = RandomState::new().hash_one(process);
        let memory = memfd_create(format!("{PREFIX}-{nonce:016x}"), MemfdFlags::CLOEXEC);
        let memory = memory.map_err(|cause| failed("memfd_create", &cause.into()))?;
        let descriptor = memory.as_raw_fd();
        OWNED.lock().insert(nonce, memory);
        Ok(Self { process, descriptor, nonce })
    }

    pub(crate) fn open(self) -> Outcome<File> {
        let path = format!("/proc/{}/fd/{}", self.process, self.descriptor);
        let expected = format!("/memfd:{PREFIX}-{:016x} (deleted)", self.nonce);
        // The number may stand for something else by now, as an id serves one communicator only.
        let target = std::fs::read_link(&path).ok();
        if target.is_none_or(|target| target.as_os_str() != expected.as_str()) {
            return Err(Failure::new(
                Code::InvalidUsage,
                format!("the unique id is used up, or process {} that made it has gone", self.process),
            ));
        }
        OpenOptions::new().read(true).write(true).open(&path).map_err(|cause| failed("open memfd", &cause))
    }

    /// Drops this process's hold on the memory, once all ranks have it mapped.
    pub(crate) fn release(self) {
        OWNED.lock().remove(&self.nonce);
    }

    pub(crate) fn encode(self) -> ncclUniqueId {
        let text = format!("{PREFIX}:{}:{}:{:016x}", self.process, self.descriptor, self.nonce);
        let mut internal = [0; BYTES];
        for (to, from) in internal.iter_mut().zip(text.bytes()) {
            *to = from as c_char;
        }
        ncclUniqueId { internal }
    }

    pub(crate) fn decode(id: &ncclUniqueId) -> Outcome<Self> {
        let bytes: Vec<u8> = id.internal.iter().map(|c| *c as u8).take_while(|byte| *byte != 0).collect();
        Self::parse(&String::from_utf8_lossy(&bytes))
            .ok_or_else(|| Failure::argument("commId does not come from ncclGetUniqueId"))
    }

    fn parse(text: &str) -> Option<Self> {
        let mut fields = text.strip_prefix(PREFIX)?.strip_prefix(':')?.split(':');
        let process = fields.next()?.parse().ok()?;
        let descriptor = fields.next()?.parse().ok()?;
        let nonce = u64::from_str_radix(fields.next()?, 16).ok()?;
        fields.next().is_none().then_some(Self { process, descriptor, nonce })
    }

    /// The id as words for shared memory.
    pub(crate) fn to_words(self) -> [u64; 3] {
        [u64::from(self.process), self.descriptor as u64, self.nonce]
    }

    /// Takes back [`Self::to_words`].
    pub(crate) fn from_words(words: [u64; 3]) -> Self {
        Self { process: words[0] as u32, descriptor: words[1] as i32, nonce: words[2] }
    }
}

/// Gives `file` at least `size` bytes, which nobody uses before all ranks have done this. A rank that is wrong about
/// their number takes nothing away from the others.
pub(crate) fn grow(file: &File, size: usize) -> Outcome<()> {
    file.write_all_at(&[0], size as u64 - 1).map_err(|cause| failed("pwrite", &cause))
}

/// The failure of a system call.
pub(crate) fn failed(call: &str, reason: &io::Error) -> Failure {
    Failure::new(Code::SystemError, format!("{call} failed: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_survive_encoding() {
        let rendezvous = Rendezvous { process: 4_000_000, descriptor: 17, nonce: u64::MAX - 5 };
        assert_eq!(Rendezvous::decode(&rendezvous.encode()).ok(), Some(rendezvous));
        assert_eq!(Rendezvous::from_words(rendezvous.to_words()), rendezvous);
    }

    /// As for ranks that disagree on how many they are: no part may vanish that another has mapped.
    #[test]
    fn memory_never_shrinks() {
        for _ in 0..1000 {
            let rendezvous = Rendezvous::create().expect("memfd");
            let file = rendezvous.open().expect("a file");
            std::thread::scope(|scope| {
                for size in [5000, 90_000] {
                    let file = &file;
                    scope.spawn(move || grow(file, size).expect("room"));
                }
            });
            assert_eq!(file.metadata().expect("a length").len(), 90_000);
            rendezvous.release();
        }
    }
}

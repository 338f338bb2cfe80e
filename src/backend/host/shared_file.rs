//! Memory files of another process.
//!
//! A peer's claims about its file are checked before use: it must be a memory file of the expected kind with a sealed
//! length, so that accesses to its mapping cannot kill this process.

use crate::error::{Code, Error, Result};
use rustix::fs::{SealFlags, fcntl_get_seals};
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The length can never change.
pub const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Where other processes find a memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The process that has it open.
    pub process: u32,
    pub descriptor: i32,
}

/// An allocation of the stand-ins whose pages are in a memory file, as they describe it.
#[repr(C)]
#[derive(Debug, Default)]
pub struct SharedBlock {
    pub begin: usize,
    pub bytes: usize,
    /// The file's descriptor, as long as it lives.
    pub file: i32,
    /// Bytes of the file that may be mapped.
    pub file_bytes: usize,
    /// Its offset in the file.
    pub offset: usize,
}

impl Address {
    pub const BYTES: usize = 8;

    fn path(self) -> String {
        format!("/proc/{}/fd/{}", self.process, self.descriptor)
    }

    pub fn to_bytes(self) -> Vec<u8> {
        [self.process.to_le_bytes(), self.descriptor.to_le_bytes()].concat()
    }

    pub fn from_bytes(record: &[u8]) -> Result<Self> {
        let [process, descriptor] = record.as_chunks::<4>().0 else {
            return Err(Error::internal("a window's address of the wrong length"));
        };
        Ok(Self { process: u32::from_le_bytes(*process), descriptor: i32::from_le_bytes(*descriptor) })
    }
}

/// Opens the file at `address`, which must stay alive during the call; its link in `/proc` must lead to `link`.
pub fn open(address: Address, link: &str) -> Result<File> {
    let path = address.path();
    let failed = |cause: io::Error| match cause.kind() {
        io::ErrorKind::NotFound => Error::new(Code::RemoteError, format!("{path}: the rank is gone, or has given up")),
        _ => Error::system(format_args!("opening the window {path}"), &cause),
    };
    // Merely opening another kind of file might have effects.
    if std::fs::read_link(&path).map_err(failed)? != Path::new(link) {
        return Err(foreign(address));
    }
    let file = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path).map_err(failed)?;
    if fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS)) { Ok(file) } else { Err(foreign(address)) }
}

pub fn length(file: &File) -> Result<u64> {
    let failed = |cause| Error::system("the length of a shared window", &cause);
    Ok(file.metadata().map_err(failed)?.len())
}

/// The refusal of a file at `address` that is not of the expected kind.
pub fn foreign(address: Address) -> Error {
    let path = address.path();
    Error::new(Code::RemoteError, format!("{path}: is no window of a group"))
}

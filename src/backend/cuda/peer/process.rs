//! Which ranks share a process: two ranks with the same [`ProcessId`] share addresses.
//!
//! The system's process id is not enough: containers on one machine number their processes separately.

use crate::error::{Error, Result};
use once_cell::sync::OnceCell;
use std::fs::File;
use std::io::Read;

const RANDOM_BYTES: usize = 16;

/// Bytes of an identity, as ranks exchange them.
pub const PROCESS_ID_BYTES: usize = RANDOM_BYTES + size_of::<u32>();

/// An identity that no other process of any machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId([u8; PROCESS_ID_BYTES]);

/// Drawn once; the process id beside it distinguishes a forked child from its parent.
static RANDOM: OnceCell<[u8; RANDOM_BYTES]> = OnceCell::new();

impl ProcessId {
    pub fn this() -> Result<Self> {
        const SOURCE: &str = "/dev/urandom";
        let random = RANDOM.get_or_try_init(|| {
            let mut bytes = [0; RANDOM_BYTES];
            File::open(SOURCE)
                .and_then(|mut file| file.read_exact(&mut bytes))
                .map_err(|cause| Error::system(SOURCE, &cause))?;
            Ok(bytes)
        })?;
        let pid = std::process::id().to_le_bytes();
        let mut id = [0; PROCESS_ID_BYTES];
        for (to, from) in id.iter_mut().zip(random.iter().chain(&pid)) {
            *to = *from;
        }
        Ok(Self(id))
    }

    pub fn to_bytes(self) -> [u8; PROCESS_ID_BYTES] {
        self.0
    }

    pub fn from_bytes(bytes: [u8; PROCESS_ID_BYTES]) -> Self {
        Self(bytes)
    }
}

//! File descriptors of memory, which processes of a machine pass each other over local sockets.
//!
//! A rank opens a socket per object, and its record has the socket's name. Once ranks have exchanged records, each
//! sends its pieces to every other rank, and receives theirs. Two limits apply: a socket queues few messages (ten by
//! default), and all messages of a user may only have as many descriptors as a process may have open. A rank that meets
//! a limit receives before it tries again. Other processes could send, too, so a message begins with the sender's
//! [`ProcessId`], which only ranks of the group know.

use crate::error::{Code, Error, Result};
use once_cell::sync::OnceCell;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, recvmsg, sendmsg_addr,
};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

/// Most descriptors per message: with eight ranks, all are fewer than the usual limit on open ones (1024).
pub const MOST_DESCRIPTORS: usize = 100;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS));
const WORD: usize = size_of::<u64>();
const HEAD: usize = PROCESS_ID_BYTES + WORD;

/// The socket by which a rank receives descriptors.
pub struct Socket {
    socket: UnixDatagram,
    name: u64,
}

/// A message from another rank.
pub struct Received {
    /// The sender's number in the group.
    pub rank: usize,
    /// The size of each of the pieces.
    pub sizes: Vec<usize>,
    /// A descriptor of each of the pieces.
    pub descriptors: Vec<OwnedFd>,
}

impl Socket {
    /// A new socket with a new name.
    pub fn new() -> Result<Self> {
        // The name must be unique, not secret.
        let name = RandomState::new().hash_one(std::process::id());
        let socket = SocketAddr::from_abstract_name(name_of(name)).and_then(|at| UnixDatagram::bind_addr(&at));
        Ok(Self { socket: socket.map_err(|cause| failed(&cause))?, name })
    }

    /// The socket's name, for [`Socket::send`].
    pub fn name(&self) -> u64 {
        self.name
    }

    /// Sends `pieces` with their sizes, from `rank` of the group, to the socket named `to`. Returns false, with nothing
    /// sent, if a limit requires that ranks receive first.
    pub fn send(&self, to: u64, rank: usize, pieces: &[(usize, OwnedFd)]) -> Result<bool> {
        let mut bytes = ProcessId::this()?.to_bytes().to_vec();
        bytes.extend((rank as u64).to_le_bytes());
        bytes.extend(pieces.iter().flat_map(|(size, _)| (*size as u64).to_le_bytes()));
        let descriptors: Vec<BorrowedFd<'_>> = pieces.iter().map(|(_, descriptor)| descriptor.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(Error::internal("too many descriptors"));
        }
        let to = SocketAddrUnix::new_abstract_name(name_of(to).as_bytes()).map_err(|cause| failed(&cause.into()))?;
        let parts = [IoSlice::new(&bytes)];
        match sendmsg_addr(&self.socket, &to, &parts, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::TOOMANYREFS | Errno::INTR) => Ok(false),
            Err(cause) => Err(failed(&cause.into())),
        }
    }

    /// The next message from a process that `is_known`; `None` if none arrives within `timeout`.
    pub fn receive(&self, timeout: Duration, is_known: impl Fn(ProcessId) -> bool) -> Result<Option<Received>> {
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            self.socket.set_read_timeout(Some(left)).map_err(|cause| failed(&cause))?;
            let mut bytes = [0; HEAD + MOST_DESCRIPTORS * WORD];
            let mut space = [MaybeUninit::uninit(); SPACE];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let parts = &mut [IoSliceMut::new(&mut bytes)];
            let length = match recvmsg(&self.socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(got) => got.bytes,
                // A signal interrupts the call, even if its handler asks for restarts.
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(cause) => return Err(failed(&cause.into())),
            };
            let descriptors = control.drain().flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(some) => some.collect(),
                _ => Vec::new(),
            });
            let descriptors: Vec<OwnedFd> = descriptors.collect();
            let message = bytes.get(..length).and_then(|it| it.split_first_chunk());
            if let Some((process, numbers)) = message
                && is_known(ProcessId::from_bytes(*process))
                && let Some((rank, sizes)) = numbers.split_first_chunk::<WORD>()
                && sizes.len() == descriptors.len() * WORD
            {
                let sizes = sizes.as_chunks::<WORD>().0.iter().map(|it| u64::from_le_bytes(*it) as usize);
                let rank = u64::from_le_bytes(*rank) as usize;
                return Ok(Some(Received { rank, sizes: sizes.collect(), descriptors }));
            }
        }
    }
}

fn name_of(number: u64) -> String {
    format!("nccl_ep-{number:016x}")
}

/// The error if not all pieces arrived, or could be sent, in time.
pub fn late() -> Error {
    failed(&std::io::ErrorKind::TimedOut.into())
}

fn failed(cause: &std::io::Error) -> Error {
    Error::new(Code::SystemError, format!("descriptors of memory between processes: {cause}"))
}

const RANDOM_BYTES: usize = 16;

/// Bytes of a [`ProcessId`].
pub const PROCESS_ID_BYTES: usize = RANDOM_BYTES + size_of::<u32>();

/// An identity of a process, unique among the processes of all machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId([u8; PROCESS_ID_BYTES]);

/// Drawn once per process; a forked child has the same, but another process id.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};

    fn file(text: &str) -> OwnedFd {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(text.as_bytes()).unwrap();
        reader.into()
    }

    #[test]
    fn descriptors_come_with_their_sizes_from_known_processes() {
        let (to, from) = (Socket::new().unwrap(), Socket::new().unwrap());
        let known = |process| Ok(process) == ProcessId::this();
        let wait = Duration::from_secs(5);
        // As from a process that does not know the group.
        from.socket.send_to_addr(&[7; 60], &SocketAddr::from_abstract_name(name_of(to.name)).unwrap()).unwrap();
        let pieces = [(4096, file("one")), (8192, file("two"))];
        assert!(from.send(to.name(), 3, &pieces).unwrap());
        drop(pieces);
        let got = to.receive(wait, known).unwrap().unwrap();
        assert_eq!((got.rank, got.sizes), (3, vec![4096, 8192]));
        let read = |it: OwnedFd| {
            let mut text = [0; 3];
            File::from(it).read_exact(&mut text).unwrap();
            text
        };
        let texts: Vec<_> = got.descriptors.into_iter().map(read).collect();
        assert_eq!(texts, [*b"one", *b"two"]);
        assert!(to.receive(Duration::from_millis(20), known).unwrap().is_none());
        while from.send(to.name(), 3, &[]).unwrap() {}
        assert!(to.receive(wait, known).unwrap().is_some() && from.send(to.name(), 3, &[]).unwrap());
        let gone = to.name();
        drop(to);
        assert!(from.send(gone, 3, &[]).is_err());
        // The system and the user determine which limit is met first.
        let pieces: Vec<_> = (0..MOST_DESCRIPTORS).map(|_| (4096, file("any"))).collect();
        let all = [(); 3].map(|()| Socket::new().unwrap());
        for to in &all {
            while from.send(to.name(), 0, &pieces).unwrap() {}
        }
        let [to, ..] = all;
        assert!(to.receive(wait, known).unwrap().is_some() && from.send(to.name(), 0, &pieces).unwrap());
    }
}

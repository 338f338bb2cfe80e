//! The memory of one object: this rank's, which is a new window or a caller's allocation, and mappings of the peers'.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::exports::Piece;
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::peer::descriptors::{self, MOST_DESCRIPTORS, ProcessId, Received, Socket};
use crate::backend::cuda::peer::window::{PeerMapping, Window, WindowRecord};
use crate::backend::cuda::peer::windows::PeerWindows;
use crate::backend::objects::{Mapped, check_left, unmappable};
use crate::error::{Code, Error, Result};
use crate::model::ids::GroupRank;
use crate::model::node_view::NodeView;
use crate::model::tensor::DevPtr;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// New windows are multiples of a device page, as peers map whole pages.
const PAGE_BYTES: usize = 2 << 20;

/// How long unmapping waits for a quiescent device. Shorter than a group's timeout, as another thread may be in an
/// exchange whose peers wait for this rank.
const UNMAP_TIMEOUT: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_micros(50);

/// This rank's memory of an object, and its mappings of the peers' memory.
pub struct ObjectMemory {
    pub windows: PeerWindows,
    begin: DevPtr,
    /// If the memory is a caller's.
    shared: Option<Shared>,
}

/// For memory composed of pieces: ranks pass each other the descriptors, which do not fit into a record.
struct Shared {
    /// An error if it cannot be opened; reported only if some rank's memory is in pieces.
    socket: Result<Socket>,
    /// Sizes and descriptors of this rank's pieces; empty if its memory is not in pieces.
    pieces: Vec<(usize, OwnedFd)>,
}

/// What a rank announces to its peers about its memory.
struct Record {
    window: WindowRecord,
    /// The memory's offset in the window.
    offset: usize,
    socket: u64,
    pieces: usize,
}

impl Record {
    const NUMBERS: usize = 3;
    const BYTES: usize = WindowRecord::BYTES + Self::NUMBERS * size_of::<u64>();

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.window.to_bytes();
        let numbers = [self.offset as u64, self.socket, self.pieces as u64];
        bytes.extend(numbers.iter().flat_map(|it| it.to_le_bytes()));
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (window, numbers) = bytes.split_at_checked(WindowRecord::BYTES).unwrap_or_default();
        let [offset, socket, pieces] = numbers.as_chunks().0 else {
            return Err(Error::internal("a short record of memory"));
        };
        Ok(Self {
            window: WindowRecord::from_bytes(window)?,
            offset: u64::from_le_bytes(*offset) as usize,
            socket: u64::from_le_bytes(*socket),
            pieces: u64::from_le_bytes(*pieces) as usize,
        })
    }
}

impl ObjectMemory {
    /// New memory of `bytes`, with arbitrary content, and its record.
    pub fn new(memory: &Arc<CudaMemory>, bytes: usize) -> Result<(Self, Vec<u8>)> {
        let window = Window::with_any(memory, bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(bytes))?;
        let record = WindowRecord::new(&window)?;
        Ok(Self::at(window.base(), (window, record), None))
    }

    /// The caller's `bytes` at `begin`, and its record. The memory must be in one allocation, or in pieces that can be
    /// exported as descriptors.
    pub fn of_caller(context: &Arc<Context>, begin: DevPtr, bytes: usize) -> Result<(Self, Vec<u8>)> {
        let _entered = context.enter()?;
        let window = Window::of_caller(context, begin).map_err(unmappable)?;
        let (window, pieces) = match WindowRecord::new(&window) {
            Ok(record) => ((window, record), Vec::new()),
            Err(cause) => pieces_of(context, begin, bytes, cause)?,
        };
        let left = (window.0.base().0 + window.1.bytes()).saturating_sub(begin.0);
        check_left(bytes, left)?;
        Ok(Self::at(begin, window, Some(Shared { socket: Socket::new(), pieces })))
    }

    fn at(begin: DevPtr, (window, record): (Window, WindowRecord), shared: Option<Shared>) -> (Self, Vec<u8>) {
        let record = Record {
            window: record,
            offset: begin.0 - window.base().0,
            socket: shared.as_ref().and_then(|it| it.socket.as_ref().ok()).map_or(0, Socket::name),
            pieces: shared.as_ref().map_or(0, |it| it.pieces.len()),
        };
        (Self { windows: PeerWindows::new(window), begin, shared }, record.to_bytes())
    }

    /// Maps the memory of this node's other ranks, given the `records` of all ranks of the group. Descriptors must
    /// arrive within `timeout`. Returns the addresses in this process, by rank of the group; 0 for ranks of other
    /// nodes. After a failure the mappings made so far stay.
    pub fn map(&mut self, view: &NodeView, records: &[&[u8]], timeout: Duration) -> Result<Vec<usize>> {
        let mut bases = vec![0; records.len()];
        let others = GroupRank::all(records.len()).zip(records);
        let others = others.filter(|(peer, _)| view.locals.contains(peer) && *peer != view.rank);
        let read = |(peer, record): (GroupRank, &&[u8])| Ok((peer, Record::from_bytes(record)?));
        let others = others.map(read).collect::<Result<Vec<_>>>()?;
        let mut came = match self.shared.take() {
            None => HashMap::new(),
            Some(shared) => shared.exchange(view.rank, &others, timeout)?,
        };
        for (peer, record) in &others {
            let base = if record.pieces == 0 {
                self.windows.map(view, *peer, &record.window, None)?
            } else {
                let mapping =
                    PeerMapping::of_pieces(&self.windows.window.context, &record.window, came.remove(&peer.index()));
                self.windows.keep(view, *peer, mapping)?
            };
            if let Some(to) = bases.get_mut(peer.index()) {
                *to = base.0 + record.offset;
            }
        }
        if let Some(own) = bases.get_mut(view.rank.index()) {
            *own = self.begin.0;
        }
        Ok(bases)
    }
}

impl Mapped for ObjectMemory {
    const RECORD_BYTES: usize = Record::BYTES;

    fn begin(&self) -> DevPtr {
        self.begin
    }

    fn publish(&mut self) {
        self.windows.window.publish();
    }

    fn unmap(&mut self) -> bool {
        let start = Instant::now();
        while !self.windows.unmap() {
            if start.elapsed() > UNMAP_TIMEOUT {
                return false;
            }
            std::thread::sleep(PAUSE);
        }
        true
    }

    fn give_back(self, all_unmapped: bool) {
        self.windows.give_back(all_unmapped);
    }
}

impl Shared {
    /// Sends this rank's pieces to the ranks `others`, in other processes, and receives theirs; the result is by rank.
    fn exchange(
        self,
        rank: GroupRank,
        others: &[(GroupRank, Record)],
        timeout: Duration,
    ) -> Result<HashMap<usize, Received>> {
        let this = ProcessId::this()?;
        let away = || others.iter().filter(|(_, record)| record.window.process != this);
        let awaited = away().filter(|(_, record)| record.pieces > 0).count();
        if awaited == 0 && self.pieces.is_empty() {
            return Ok(HashMap::new());
        }
        let socket = self.socket?;
        let is_known = |process| away().any(|(_, record)| record.window.process == process);
        let mut unsent: Vec<u64> =
            away().map(|(_, record)| record.socket).filter(|_| !self.pieces.is_empty()).collect();
        let mut came = HashMap::new();
        let start = Instant::now();
        loop {
            let mut full = Vec::new();
            for to in unsent {
                if !socket.send(to, rank.index(), &self.pieces)? {
                    full.push(to);
                }
            }
            unsent = full;
            if unsent.is_empty() && came.len() >= awaited {
                return Ok(came);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(descriptors::late());
            }
            let got = socket.receive(if unsent.is_empty() { left } else { PAUSE.min(left) }, is_known)?;
            came.extend(got.map(|got| (got.rank, got)));
        }
    }
}

/// A caller's memory in pieces as a window, and the pieces; `cause` is the error of treating it as an allocation.
fn pieces_of(context: &Arc<Context>, begin: DevPtr, bytes: usize, cause: Error) -> Result<(InWindow, Pieces)> {
    let (base, pieces) = Piece::all(begin, bytes).map_err(|_| unmappable(cause))?;
    if pieces.len() > MOST_DESCRIPTORS {
        let text = format!("{} pieces, expected at most {MOST_DESCRIPTORS}", pieces.len());
        return Err(unmappable(Error::new(Code::InvalidArgument, text)));
    }
    let all = pieces.iter().map(|piece| piece.bytes).sum();
    let exported = pieces.iter().map(|piece| Ok((piece.bytes, piece.export()?)));
    let exported = exported.collect::<Result<_>>().map_err(unmappable)?;
    let window = Window::of_pieces(context, base, all);
    let record = WindowRecord::of_pieces(&window)?;
    Ok(((window, record), exported))
}

type InWindow = (Window, WindowRecord);
type Pieces = Vec<(usize, OwnedFd)>;

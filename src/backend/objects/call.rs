//! What the ranks call, as they tell each other.

use crate::backend::bootstrap::Bootstrap;
use crate::backend::objects::Kind;
use crate::error::refusal::{AmongRanks, Operation, Subject};
use crate::error::{Error, Result, Value};
use crate::model::ids::GroupRank;
use crate::model::ops::Stream;

/// A call, and the object that it makes or ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Call {
    operation: Operation,
    pub object: u32,
}

impl Call {
    const ALL: [Operation; 5] = [
        Operation::MemoryNew,
        Operation::MemoryEnd,
        Operation::MemoryGiven,
        Operation::MemoryGivenEnd,
        Operation::LlDispatch,
    ];
    const BYTES: usize = 8;

    pub fn making(kind: Kind, object: u32) -> Self {
        let operation = match kind {
            Kind::Own => Operation::MemoryNew,
            Kind::Given => Operation::MemoryGiven,
            Kind::Views => Operation::LlDispatch,
        };
        Self { operation, object }
    }

    pub fn ending(kind: Kind, object: u32) -> Self {
        let operation = match kind {
            Kind::Own | Kind::Views => Operation::MemoryEnd,
            Kind::Given => Operation::MemoryGivenEnd,
        };
        Self { operation, object }
    }

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let number = Self::ALL.iter().position(|it| *it == self.operation).unwrap_or(Self::ALL.len()) as u32;
        let mut bytes = [0; Self::BYTES];
        let (first, second) = bytes.split_at_mut(4);
        first.copy_from_slice(&number.to_le_bytes());
        second.copy_from_slice(&self.object.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let [number, object] = bytes.as_chunks::<4>().0 else { return None };
        let operation = *Self::ALL.get(u32::from_le_bytes(*number) as usize)?;
        Some(Self { operation, object: u32::from_le_bytes(*object) })
    }

    /// Refuses what `rank` calls instead.
    fn check_same(self, rank: GroupRank, other: Option<Self>) -> Result<()> {
        let Some(other) = other else { return Err(Error::internal("a call of another rank that is none")) };
        if other == self {
            return Ok(());
        }
        let same = AmongRanks::Same { rank };
        Err(if other.operation == self.operation {
            Error::usage(Subject::Memory, same)
                .got(format_args!("object {}", self.object), format_args!("object {}", other.object))
        } else {
            Error::usage(Subject::Operation, same)
                .found(Value::Operation(self.operation), Value::Operation(other.operation))
        })
    }
}

/// Meets the other ranks in `call`; `mine` is what this rank tells them, of so many `bytes`. They all go on with the records, or fail.
pub fn meet(
    bootstrap: &Bootstrap,
    call: Call,
    mine: Result<Vec<u8>>,
    bytes: usize,
    stream: Stream,
) -> Result<Vec<Vec<u8>>> {
    let mine = mine.map(|record| [&call.to_bytes()[..], &record].concat());
    let mut records = bootstrap.agree(mine, Call::BYTES + bytes, stream)?;
    for (rank, record) in GroupRank::all(records.len()).zip(&mut records) {
        let head: Vec<u8> = record.drain(..Call::BYTES).collect();
        call.check_same(rank, Call::from_bytes(&head))?;
    }
    Ok(records)
}

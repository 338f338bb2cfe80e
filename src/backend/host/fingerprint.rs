//! The fingerprint of an operation, the same on all its ranks. Every message begins with it, so a rank that makes
//! another call is named, and its message is never misread.

use crate::backend::host::message::{Message, Reader};
use crate::error::refusal::{AmongRanks, Operation, Role, Subject};
use crate::error::{Error, Result, Value};
use crate::model::group::LlCombineMode;
use crate::model::ids::GroupRank;
use crate::model::layout::layout_name;
use crate::model::scales::{RowBytes, WireRow};
use crate::model::tensor::DType;

/// Operations at the index that stands for them in a message.
const OPERATIONS: [Operation; 5] =
    [Operation::LlDispatch, Operation::LlCombine, Operation::HtDispatch, Operation::HtCombine, Operation::HtHandle];

/// Begins a message of `call`.
pub fn announce(call: Operation, message: &mut Message<'_>) {
    message.number(call as usize);
}

/// The rest of the message of `source`, if it belongs to `call`.
pub fn read_as(call: Operation, message: &[u8], source: usize) -> Result<Reader<'_>> {
    let mut reader = Reader::new(message);
    let number = reader.number()?;
    if number == call as usize {
        return Ok(reader);
    }
    let theirs = match OPERATIONS.get(number) {
        Some(theirs) => Value::Operation(*theirs),
        None => Value::Text("unknown".to_owned()),
    };
    Err(differs(Subject::Operation, source).found(Value::Operation(call), theirs))
}

/// One rank's view of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    pub call: Operation,
    /// Whether the receive phase is left to a completion.
    pub staged: bool,
    /// HT: the number of the operation that created the handle, the same on all its ranks.
    pub handle: Option<u64>,
    /// Ids per token of the handle.
    pub top_k: usize,
    /// Whether rows are rank-major.
    pub by_rank: bool,
    /// Whether they go into views.
    pub in_view: bool,
    /// Whether each entry's row goes home.
    pub exact: bool,
    /// The rows as they travel.
    pub row: WireRow,
}

impl Fingerprint {
    /// A message that begins with the fingerprint.
    pub fn message<'a>(&self) -> Message<'a> {
        let mut message = Message::default();
        announce(self.call, &mut message);
        message.number(usize::from(self.staged));
        message.number(self.handle_number());
        message.number(self.top_k);
        message.number(self.layout());
        message.number(usize::from(self.exact));
        message.number(self.row.payload.bytes());
        message.number(self.row.scale_bytes());
        message.number(self.row.payload.dtype as usize);
        message.number(self.scale_type());
        message
    }

    /// The rest of the message of `source`, if its fingerprint is the same.
    pub fn read<'a>(&self, message: &'a [u8], source: usize) -> Result<Reader<'a>> {
        let mut reader = read_as(self.call, message, source)?;
        if reader.number()? != usize::from(self.staged) {
            return Err(differs(Subject::Staging, source));
        }
        if reader.number()? != self.handle_number() {
            return Err(differs(Subject::Handle, source));
        }
        let theirs = reader.number()?;
        if theirs != self.top_k {
            return Err(differs(Subject::Size(Role::Ids, 1), source).got(self.top_k, theirs));
        }
        let theirs = reader.number()?;
        if theirs != self.layout() {
            let mine = layout_name(self.by_rank, self.in_view);
            let theirs = layout_name(theirs == 1, theirs == 2);
            return Err(differs(Subject::Layout, source).got(mine, theirs));
        }
        if reader.number()? != usize::from(self.exact) {
            let [mine, theirs] = LlCombineMode::variants(self.exact);
            return Err(differs(Subject::Variant, source).got(mine, theirs));
        }
        let mine = RowBytes::from(self.row);
        let theirs = RowBytes { payload: reader.number()?, scales: reader.number()? };
        if mine != theirs {
            let [mine, theirs] = RowBytes::in_words(mine, theirs);
            return Err(differs(Subject::RowBytes, source).got(mine, theirs));
        }
        same_type(Subject::RowType, source, self.row.payload.dtype as usize, reader.number()?)?;
        same_type(Subject::ScaleType, source, self.scale_type(), reader.number()?)?;
        Ok(reader)
    }

    /// The layout as a number.
    fn layout(&self) -> usize {
        usize::from(self.by_rank) + usize::from(self.in_view)
    }

    /// The number of the scales' type; rows without scales have none.
    fn scale_type(&self) -> usize {
        let scales = self.row.scales;
        scales.map_or(usize::MAX, |scales| scales.dtype as usize)
    }

    fn handle_number(&self) -> usize {
        self.handle.map_or(0, |handle| handle as usize)
    }
}

fn same_type(subject: Subject, source: usize, mine: usize, theirs: usize) -> Result<()> {
    if mine == theirs {
        return Ok(());
    }
    let name = |number| {
        let dtype = u32::try_from(number).ok().and_then(DType::from_raw);
        dtype.map_or("another".to_owned(), |dtype| dtype.to_string())
    };
    Err(differs(subject, source).got(name(mine), name(theirs)))
}

fn differs(subject: Subject, source: usize) -> Error {
    Error::usage(subject, AmongRanks::Same { rank: GroupRank::new(source) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensor::RowType;

    const MINE: Fingerprint = Fingerprint {
        call: Operation::LlDispatch,
        staged: false,
        handle: Some(5),
        top_k: 8,
        by_rank: false,
        in_view: false,
        exact: false,
        row: WireRow { payload: RowType { dtype: DType::Bfloat16, hidden: 64 }, scales: None },
    };

    #[test]
    fn the_rest_follows_the_fingerprint() {
        let mut message = MINE.message();
        message.bytes(b"rest");
        let mut written = vec![0; message.len()];
        message.write_to(&mut written).unwrap();
        let mut reader = MINE.read(&written, 0).unwrap();
        assert_eq!(reader.bytes(4).unwrap(), b"rest");
        assert!(MINE.read(&written[..12], 0).is_err());
        assert!(MINE.read(&[0xff; 64], 0).is_err());
    }
}

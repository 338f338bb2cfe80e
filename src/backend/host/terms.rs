//! What the ranks must agree on in an operation: every message of it begins with that, so that a rank
//! that calls something else is named, and nothing of its message is taken for something else.
#![forbid(unsafe_code)]

use crate::backend::host::message::{Message, Reader};
use crate::error::refusal::{AmongRanks, Operation, Role, Subject};
use crate::error::{Error, Result, Value};
use crate::model::dtype::DType;
use crate::model::ops::RowType;
use std::fmt;

/// What was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)] // As they are called.
pub enum Call {
    LlDispatch,
    LlCombine,
    HtDispatch,
    HtCombine,
    HtHandle,
}

impl Call {
    const ALL: [Self; 5] = [
        Self::LlDispatch,
        Self::LlCombine,
        Self::HtDispatch,
        Self::HtCombine,
        Self::HtHandle,
    ];

    /// The operation that it stands for in a refusal.
    pub fn operation(self) -> Operation {
        match self {
            Self::LlDispatch => Operation::LlDispatch,
            Self::LlCombine => Operation::LlCombine,
            Self::HtDispatch => Operation::HtDispatch,
            Self::HtCombine => Operation::HtCombine,
            Self::HtHandle => Operation::HtHandle,
        }
    }
}

impl Call {
    /// Begins a message of this call.
    pub fn announce(self, message: &mut Message<'_>) {
        message.number(self as usize);
    }

    /// What follows in the message of `source`, if it is of this call.
    pub fn read(self, message: &[u8], source: usize) -> Result<Reader<'_>> {
        let mut reader = Reader::new(message);
        let call = reader.number()?;
        if call == self as usize {
            return Ok(reader);
        }
        let theirs = match Self::ALL.get(call) {
            Some(theirs) => Value::Operation(theirs.operation()),
            None => Value::Text("unknown".to_owned()),
        };
        Err(differs(Subject::Operation, source).found(Value::Operation(self.operation()), theirs))
    }
}

/// One rank's side of what must be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// What was called.
    pub call: Call,
    /// Whether the receive phase waits for a completion.
    pub staged: bool,
    /// In HT the number of the operation that made the handle, the same on all its ranks.
    pub handle: Option<u64>,
    /// Ids per token of the handle.
    pub top_k: usize,
    /// Rows of the tokens.
    pub row: RowType,
}

impl Terms {
    /// A message that begins with these terms.
    pub fn message<'a>(&self) -> Message<'a> {
        let mut message = Message::default();
        self.call.announce(&mut message);
        message.number(usize::from(self.staged));
        message.number(self.handle_number());
        message.number(self.top_k);
        message.number(self.row.bytes());
        message.number(self.row.dtype as usize);
        message
    }

    /// What follows the terms in the message of `source`, if they are these.
    pub fn read<'a>(&self, message: &'a [u8], source: usize) -> Result<Reader<'a>> {
        let mut reader = self.call.read(message, source)?;
        if reader.number()? != usize::from(self.staged) {
            return Err(differs(Subject::Staging, source));
        }
        if reader.number()? != self.handle_number() {
            return Err(differs(Subject::Handle, source));
        }
        same(
            Subject::Size(Role::Ids, 1),
            source,
            self.top_k,
            reader.number()?,
        )?;
        same(
            Subject::RowBytes,
            source,
            self.row.bytes(),
            reader.number()?,
        )?;
        let theirs = reader.number()?;
        if theirs != self.row.dtype as usize {
            let theirs = u32::try_from(theirs).ok().and_then(DType::from_raw);
            let theirs = theirs.map_or("another".to_owned(), |dtype| dtype.to_string());
            return Err(differs(Subject::RowType, source).got(self.row.dtype, theirs));
        }
        Ok(reader)
    }

    fn handle_number(&self) -> usize {
        self.handle.map_or(0, |handle| handle as usize)
    }
}

fn same<T: PartialEq + fmt::Display>(
    subject: Subject,
    source: usize,
    mine: T,
    theirs: T,
) -> Result<()> {
    if theirs == mine {
        return Ok(());
    }
    Err(differs(subject, source).got(mine, theirs))
}

fn differs(subject: Subject, source: usize) -> Error {
    Error::usage(subject, AmongRanks::Same { rank: source })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINE: Terms = Terms {
        call: Call::LlDispatch,
        staged: false,
        handle: Some(5),
        top_k: 8,
        row: RowType {
            dtype: DType::Bfloat16,
            hidden: 64,
        },
    };

    fn written(terms: Terms) -> Vec<u8> {
        let mut message = terms.message();
        message.bytes(b"rest");
        let mut written = vec![0; message.len()];
        message.write_to(&mut written).unwrap();
        written
    }

    fn refusal(change: impl FnOnce(&mut Terms)) -> String {
        let mut theirs = MINE;
        change(&mut theirs);
        let error = MINE.read(&written(theirs), 3).err().unwrap();
        error.text()
    }

    #[test]
    fn what_differs_is_named() {
        let rule = "AmongRanks(Same { rank: 3 })";
        assert_eq!(
            refusal(|theirs| theirs.call = Call::LlCombine),
            format!("Operation: {rule} (got LlDispatch, expected LlCombine)")
        );
        assert_eq!(
            refusal(|theirs| theirs.staged = true),
            format!("Staging: {rule}")
        );
        assert_eq!(
            refusal(|theirs| theirs.handle = Some(6)),
            format!("Handle: {rule}")
        );
        assert_eq!(
            refusal(|theirs| theirs.top_k = 4),
            format!("Size(Ids, 1): {rule} (got 8, expected 4)")
        );
        assert_eq!(
            refusal(|theirs| theirs.row.hidden = 8),
            format!("RowBytes: {rule} (got 128, expected 16)")
        );
        assert_eq!(
            refusal(|theirs| theirs.row.dtype = DType::Float16),
            format!("RowType: {rule} (got bfloat16, expected float16)")
        );
    }

    #[test]
    fn the_rest_follows_the_terms() {
        let written = written(MINE);
        let mut reader = MINE.read(&written, 0).unwrap();
        assert_eq!(reader.bytes(4).unwrap(), b"rest");
        assert!(MINE.read(&written[..12], 0).is_err());
        assert!(MINE.read(&[0xff; 64], 0).is_err());
    }
}

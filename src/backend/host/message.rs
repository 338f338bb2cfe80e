//! The message that one rank posts for an operation: a sequence of numbers and bytes.
//!
//! The reader reads in the order of writing, so no offsets need to be agreed on.

use crate::error::{Error, Result};
use std::borrow::Cow;

/// A message under construction. Large parts are borrowed until the message is written out.
#[derive(Default)]
pub struct Message<'a> {
    parts: Vec<Cow<'a, [u8]>>,
}

impl<'a> Message<'a> {
    pub fn number(&mut self, number: usize) {
        self.parts.push(Cow::Owned((number as u64).to_le_bytes().to_vec()));
    }

    /// Appends bytes, whose number the reader must know.
    pub fn bytes(&mut self, bytes: impl Into<Cow<'a, [u8]>>) {
        self.parts.push(bytes.into());
    }

    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len()).sum()
    }

    /// Writes the message to `to`, which is [`Message::len`] bytes long.
    pub fn write_to(&self, mut to: &mut [u8]) -> Result<()> {
        for part in &self.parts {
            let (here, rest) = to
                .split_at_mut_checked(part.len())
                .ok_or_else(|| Error::internal("a message is longer than its bank"))?;
            here.copy_from_slice(part);
            to = rest;
        }
        Ok(())
    }
}

/// Reads a message from its start.
#[derive(Clone, Copy)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    pub fn number(&mut self) -> Result<usize> {
        let number = self.bytes(size_of::<u64>())?.try_into().map(u64::from_le_bytes);
        number.ok().and_then(|number| usize::try_from(number).ok()).ok_or_else(too_short)
    }

    pub fn bytes(&mut self, bytes: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or_else(too_short)?;
        self.rest = rest;
        Ok(taken)
    }

    /// The next `count` elements of `size` bytes. The sender chose `count`, so it may be any number.
    pub fn array(&mut self, count: usize, size: usize) -> Result<&'a [u8]> {
        self.bytes(count.checked_mul(size).ok_or_else(too_short)?)
    }
}

fn too_short() -> Error {
    Error::internal("a message ends before its last part")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back_in_order() {
        let mut message = Message::default();
        message.number(3);
        message.bytes(b"abc");
        message.number(0);
        let mut written = vec![0; message.len()];
        message.write_to(&mut written).unwrap();
        let mut reader = Reader::new(&written);
        assert_eq!(reader.number().unwrap(), 3);
        assert_eq!(reader.bytes(3).unwrap(), b"abc");
        assert_eq!(reader.number().unwrap(), 0);
        assert!(reader.bytes(1).is_err());
    }

    #[test]
    fn a_count_that_overflows_is_refused() {
        let mut reader = Reader::new(&[0; 64]);
        assert_eq!(reader.array(4, 8).unwrap().len(), 32);
        assert!(reader.array(5, 8).is_err());
        assert!(reader.array(1 << 61, 8).is_err());
        assert_eq!(reader.array(4, 8).unwrap().len(), 32);
    }
}

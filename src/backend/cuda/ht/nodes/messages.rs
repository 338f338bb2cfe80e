//! The layout of a stage's messages, of which there is one per pair of ranks and direction: a header, rows, and the
//! rows' tails. Both sides compute the sizes from the number of tokens and the bytes of each.

use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::params::common::MessageHeader;
use crate::backend::cuda::params::ht_nodes::HtMessages;
use crate::backend::net::two_sided::Message;
use crate::error::Result;
use crate::model::group::ROW_ALIGN;
use crate::model::ids::GroupRank;
use crate::model::scales::WireRow;
use crate::model::tensor::DevPtr;

pub const HEADER_BYTES: usize = size_of::<MessageHeader>();

/// Bytes per token in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBytes {
    /// The row, with scales.
    pub row: usize,
    /// What accompanies the row, such as ids and weights: the same for all tokens, or zero.
    pub tail: usize,
}

impl TokenBytes {
    /// For a `row` with a tail of `tail` bytes.
    pub fn new(row: impl Into<WireRow>, tail: usize) -> Self {
        Self { row: row.into().slot_bytes(), tail: tail.next_multiple_of(ROW_ALIGN) }
    }
}

/// The memory of a stage's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bank {
    /// Address of the first message's first row.
    pub rows: usize,
    /// Distance to the next message's first row.
    pub stride: usize,
    pub bytes: TokenBytes,
}

impl Bank {
    /// Message number `index`, with `tokens`.
    pub fn parcel(&self, index: usize, tokens: usize, has_header: bool) -> Parcel {
        Parcel { first_row: self.rows + index * self.stride, tokens, bytes: self.bytes, has_header }
    }

    /// The messages as a kernel parameter.
    pub fn messages(&self) -> Result<HtMessages> {
        Ok(HtMessages {
            rows: self.rows as *mut u8,
            stride: self.stride as u64,
            row_bytes: to_u32(self.bytes.row)?,
            tail_bytes: to_u32(self.bytes.tail)?,
        })
    }
}

/// What one rank sends another in a stage: one message, or two if the rows are elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parcel {
    pub first_row: usize,
    tokens: usize,
    bytes: TokenBytes,
    has_header: bool,
}

impl Parcel {
    fn row_bytes(&self) -> usize {
        self.tokens * self.bytes.row
    }

    /// Bytes before the rows. A message with tails has room for a header, even if it does not use one.
    fn front_bytes(&self) -> usize {
        let tails = self.tokens * self.bytes.tail;
        if tails > 0 || self.has_header { tails + HEADER_BYTES } else { 0 }
    }

    /// Everything as one message to or from `peer`.
    pub fn with_rows(&self, peer: GroupRank) -> Message {
        Message { bytes: self.front_bytes() + self.row_bytes(), ..self.front(peer) }
    }

    /// Everything but the rows.
    fn front(&self, peer: GroupRank) -> Message {
        let bytes = self.front_bytes();
        Message { peer, data: DevPtr(self.first_row - bytes), bytes }
    }

    /// Only the rows, which are at `rows`.
    fn rows(&self, peer: GroupRank, rows: usize) -> Message {
        Message { peer, data: DevPtr(rows), bytes: self.row_bytes() }
    }

    /// Everything as one message, or as two if the rows are elsewhere.
    pub fn parts(self, peer: GroupRank, rows: Option<usize>) -> impl Iterator<Item = Message> {
        let apart = rows.map(|rows| self.rows(peer, rows));
        let first = match apart {
            Some(_) => self.front(peer),
            None => self.with_rows(peer),
        };
        std::iter::once(first).chain(apart)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::scales::ScaleType;
    use crate::model::tensor::{DType, RowType};

    const BANK: Bank = Bank { rows: 4096, stride: 8192, bytes: TokenBytes { row: 160, tail: 32 } };

    #[test]
    fn scales_are_a_part_of_the_row() {
        let payload = RowType { dtype: DType::Float8E4M3, hidden: 128 };
        let scales = ScaleType { dtype: DType::Float32, count: 1 };
        let row = WireRow { payload, scales: Some(scales) };
        assert_eq!(TokenBytes::new(row, 24), TokenBytes { row: 144, tail: 32 });
        assert_eq!(TokenBytes::new(payload, 0).row, 128);
    }

    #[test]
    fn a_message_is_one_run_of_bytes_around_its_first_row() {
        let parcel = BANK.parcel(1, 3, false);
        let peer = GroupRank::new(5);
        let whole = parcel.with_rows(peer);
        assert_eq!(whole.data.0, 4096 + 8192 - HEADER_BYTES - 3 * 32);
        assert_eq!(whole.bytes, 3 * 32 + HEADER_BYTES + 3 * 160);
        let parts: Vec<_> = parcel.parts(peer, Some(parcel.first_row)).collect();
        let [front, rows] = parts.try_into().unwrap();
        assert_eq!(front.data, whole.data);
        assert_eq!(front.data.0 + front.bytes, rows.data.0);
        assert_eq!(front.bytes + rows.bytes, whole.bytes);
        assert_eq!(parcel.rows(peer, 77).data, DevPtr(77));
        assert!(parcel.parts(peer, None).eq([whole]));
    }

    #[test]
    fn without_tokens_only_a_header_travels() {
        let peer = GroupRank::new(1);
        assert_eq!(BANK.parcel(0, 0, false).with_rows(peer).bytes, 0);
        assert_eq!(BANK.parcel(0, 0, true).with_rows(peer).bytes, HEADER_BYTES);
        let bytes = TokenBytes { row: 160, tail: 0 };
        let bank = Bank { bytes, ..BANK };
        assert_eq!(bank.parcel(0, 2, false).front(peer).bytes, 0);
    }
}

//! Buffers for the messages of LL operations between nodes, sent and received.
//!
//! Messages are received into plain device memory, one buffer per channel. That suffices without acknowledgements:
//! a receive is enqueued after all readers of the previous message.

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::params::common::MessageHeader;
use crate::backend::cuda::params::ll::LL_MAX_TOP_K;
use crate::backend::cuda::regions::Regions;
use crate::error::Result;
use crate::model::group::GroupFacts;
use crate::model::node_view::NodeView;
use crate::model::tensor::DevPtr;
use std::sync::Arc;

const REGION_ALIGN: usize = 256;
/// In front of each message.
pub const HEADER_BYTES: usize = size_of::<MessageHeader>();

/// A channel's memory for what crosses the network.
pub struct ChannelMemory {
    _buffer: Buffer,
    /// Messages with a row for each token. In a dispatch this rank sends one to all rail peers, and receives one from
    /// each source. On the way back, in a combine, one goes to each source, and one comes from each other node.
    pub rows: Leg,
    /// Messages with a weight for each entry, which have the same way there and no way back.
    pub weights: Leg,
}

/// The messages of one exchange. Each begins with a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leg {
    /// The first that this rank sends.
    pub sends: DevPtr,
    /// The first that it receives.
    pub receives: DevPtr,
    /// From one message to the next.
    pub stride: usize,
}

impl ChannelMemory {
    /// Memory for a rank of a group with the bounds of `facts`.
    pub fn new(memory: &Arc<CudaMemory>, view: &NodeView, facts: &GroupFacts) -> Result<Self> {
        let entries = facts.max_tokens.unwrap_or(0) * LL_MAX_TOP_K as usize;
        let mut regions = Regions::new(REGION_ALIGN);
        let mut leg = |sends: usize, bytes: usize| {
            let stride = (HEADER_BYTES + bytes).next_multiple_of(REGION_ALIGN);
            let mut take = |messages: usize| DevPtr(regions.take(messages * stride));
            Leg { sends: take(sends), receives: take(view.remote().len()), stride }
        };
        let rows = leg(view.others(), most_rows_bytes(facts));
        let weights = leg(1, entries * size_of::<f32>());
        // What is there must be the header of no operation.
        let buffer = Buffer::zeroed(memory, regions.bytes())?;
        Ok(Self { rows: rows.moved(buffer.data()), weights: weights.moved(buffer.data()), _buffer: buffer })
    }
}

/// Most bytes of a message of a group with the bounds of `facts`.
pub fn most_message_bytes(facts: &GroupFacts) -> usize {
    HEADER_BYTES + most_rows_bytes(facts)
}

/// Of a row, ids and weights for each token.
fn most_rows_bytes(facts: &GroupFacts) -> usize {
    let entry = size_of::<i64>() + size_of::<f32>();
    let of_token = facts.row_bytes + LL_MAX_TOP_K as usize * entry;
    facts.max_tokens.unwrap_or(0) * of_token
}

impl Leg {
    /// The way back: messages go to where others came from.
    pub fn back(self) -> Self {
        Self { sends: self.receives, receives: self.sends, ..self }
    }

    fn moved(self, base: DevPtr) -> Self {
        Self { sends: DevPtr(base.0 + self.sends.0), receives: DevPtr(base.0 + self.receives.0), ..self }
    }
}

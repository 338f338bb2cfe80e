//! Where the messages of LL operations between nodes lie: what this rank sends, and what comes.
//!
//! What is received lies in plain memory of this rank, one set for each channel. It needs no acknowledgement: a
//! message is received no earlier than in its turn on this rank, behind everything that read the one before.
//!
//! On two nodes an exchange can be an all-gather: both ranks of a rail send a message of the same size, and both
//! messages lie side by side in the order of the nodes. So the memory for what this rank sends stands beside that for
//! what comes, in front of it on the first node and behind it on the second. What comes begins at the same place in any
//! case: its head is told from an earlier one by the epoch.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::params::ll::{LL_MAX_TOP_K, LlHello};
use crate::backend::cuda::sizes::Regions;
use crate::error::Result;
use crate::model::group::GroupFacts;
use crate::model::tensor::DevPtr;
use std::sync::Arc;

const REGION_ALIGN: usize = 256;
/// Of messages that lie side by side: kernels read rows by so many bytes.
const MESSAGE_ALIGN: usize = 16;
/// In front of each message.
pub const HEAD_BYTES: usize = size_of::<LlHello>();

/// With whom a rank exchanges messages.
pub struct Partners {
    /// The sources from 1 on, whose messages come here.
    pub sources: usize,
    /// The nodes with a gateway of this rank, which send sums home.
    pub other_nodes: usize,
    /// Whether this rank's node is the first.
    pub is_first: bool,
}

/// A channel's memory for what crosses the network.
pub struct ChannelMemory {
    _buffer: Buffer,
    /// Messages with a row for each token. In a dispatch this rank sends one to all gateways, and receives one from
    /// each source. On the way back, in a combine, one goes to each source, and one comes from each other node.
    pub rows: Leg,
    /// Messages with a weight for each entry, which have the same way there and no way back.
    pub weights: Leg,
}

/// The messages of one exchange. Each begins with a head.
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
    pub fn new(memory: &Arc<CudaMemory>, partners: &Partners, facts: &GroupFacts) -> Result<Self> {
        let tokens = facts.max_tokens.unwrap_or(0);
        let entries = tokens * LL_MAX_TOP_K as usize;
        let rows = tokens * facts.row_bytes + entries * size_of::<i64>();
        let ([rows, weights], bytes) = legs(partners, rows, entries * size_of::<f32>());
        // What is there must be the head of no operation.
        let buffer = Buffer::zeroed(memory, bytes)?;
        Ok(Self {
            rows: rows.moved(buffer.data()),
            weights: weights.moved(buffer.data()),
            _buffer: buffer,
        })
    }
}

/// The legs of rows and weights, which have so many bytes behind their heads, as offsets; and their size.
fn legs(partners: &Partners, rows: usize, weights: usize) -> ([Leg; 2], usize) {
    let mut regions = Regions::new(REGION_ALIGN);
    let mut leg = |sends: usize, bytes: usize| {
        let stride = (HEAD_BYTES + bytes).next_multiple_of(REGION_ALIGN);
        let mut take = |messages: usize| DevPtr(regions.take(messages * stride));
        let (sends, receives) = match partners.is_first {
            true => (take(sends), take(partners.sources)),
            false => {
                let receives = take(partners.sources);
                (take(sends), receives)
            }
        };
        Leg {
            sends,
            receives,
            stride,
        }
    };
    let legs = [leg(partners.other_nodes, rows), leg(1, weights)];
    (legs, regions.bytes())
}

impl Leg {
    /// The way back: messages go to where others came from.
    pub fn back(self) -> Self {
        Self {
            sends: self.receives,
            receives: self.sends,
            ..self
        }
    }

    /// The same as an all-gather of two messages of `bytes` each, which are rounded up.
    pub fn side_by_side(self, bytes: usize) -> Self {
        let stride = bytes.next_multiple_of(MESSAGE_ALIGN);
        let sends = match self.sends.0 < self.receives.0 {
            true => self.receives.0 - stride,
            false => self.receives.0 + stride,
        };
        Self {
            sends: DevPtr(sends),
            receives: self.receives,
            stride,
        }
    }

    /// Where the messages of an all-gather begin.
    pub fn start(&self) -> DevPtr {
        DevPtr(self.sends.0.min(self.receives.0))
    }

    fn moved(self, base: DevPtr) -> Self {
        Self {
            sends: DevPtr(base.0 + self.sends.0),
            receives: DevPtr(base.0 + self.receives.0),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_an_all_gather_lie_in_the_order_of_the_nodes() {
        for is_first in [true, false] {
            let partners = Partners {
                sources: 1,
                other_nodes: 1,
                is_first,
            };
            let (legs, bytes) = legs(&partners, 1000, 100);
            for leg in legs {
                for size in [HEAD_BYTES, HEAD_BYTES + 41, leg.stride] {
                    let gathered = leg.side_by_side(size);
                    assert_eq!(gathered.stride, size.next_multiple_of(MESSAGE_ALIGN));
                    assert_eq!(gathered.receives, leg.receives);
                    let own = usize::from(!is_first) * gathered.stride;
                    assert_eq!(gathered.sends.0, gathered.start().0 + own);
                    let places = leg.sends.0.min(leg.receives.0)..bytes;
                    assert!(places.contains(&gathered.start().0));
                    assert!(
                        gathered.start().0 + 2 * gathered.stride <= places.start + 2 * leg.stride
                    );
                }
                assert_eq!(leg.back().back(), leg);
            }
        }
    }
}

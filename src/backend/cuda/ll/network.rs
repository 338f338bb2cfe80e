//! What LL operations over several nodes have beside those on one: where the ranks are, memory for what crosses
//! the network, and a stream for what runs behind the caller's own work.

use crate::backend::cuda::driver::event::DriverEvent;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ll::messages::{ChannelMemory, Leg, Partners};
use crate::backend::cuda::network::Network;
use crate::backend::cuda::order::Order;
use crate::backend::cuda::params::ll::{LL_CHANNELS, LlNodes, LlRankOnNode};
use crate::backend::cuda::regions::{own_place, to_u32};
use crate::backend::cuda::side_streams::SideStreams;
use crate::backend::net::two_sided::{Label, Message, Transport};
use crate::error::{Error, Result};
use crate::model::group::GroupFacts;
use crate::model::ops::{LlOp, Stream};
use crate::model::tensor::DevPtr;
use crate::model::topology::Topology;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The LL side of a group's network.
pub struct LlNetwork {
    network: Arc<Network>,
    tables: Tables,
    channels: Vec<ChannelMemory>,
    /// Messages of the operation that is being enqueued, kept for their memory.
    messages: Mutex<Messages>,
    /// How many were enqueued.
    operations: AtomicU64,
    max_tokens: usize,
    /// Runs what staged operations send over the network, behind the caller's streams.
    background: SideStreams,
    /// The order of what runs there.
    pub background_order: Order,
    /// Where the background begins to follow a caller's stream, or that stream the background.
    pub join: Mutex<DriverEvent>,
}

/// Messages of one operation.
#[derive(Default)]
struct Messages {
    sends: Vec<Message>,
    receives: Vec<Message>,
}

/// Where the ranks of the group are, for kernels.
struct Tables {
    _buffer: Buffer,
    of_rank: DevPtr,
    rank_of_peer: DevPtr,
    rank_of_source: DevPtr,
    gateways: DevPtr,
}

impl LlNetwork {
    /// The LL side of `network`, for operations with the bounds of `facts`.
    pub fn new(
        network: Arc<Network>,
        memory: &Arc<CudaMemory>,
        facts: &GroupFacts,
    ) -> Result<Self> {
        let context = memory.context();
        let max_tokens = facts.max_tokens.unwrap_or(0);
        let partners = Partners {
            sources: network.sources().len() - 1,
            other_nodes: network.topology().nodes() - 1,
        };
        let channel = |_| ChannelMemory::new(memory, &partners, facts);
        Ok(Self {
            tables: Tables::new(memory, &network)?,
            channels: (0..LL_CHANNELS).map(channel).collect::<Result<_>>()?,
            messages: Mutex::default(),
            operations: AtomicU64::new(0),
            max_tokens,
            background_order: Order::new(context)?,
            join: Mutex::new(DriverEvent::new(context)?),
            network,
            background: SideStreams::new(memory)?,
        })
    }

    /// The memory of channel `channel`.
    pub fn channel(&self, channel: u32) -> Result<&ChannelMemory> {
        let found = self.channels.get(channel as usize);
        found.ok_or_else(|| Error::internal(format!("no channel {channel}")))
    }

    /// The ranks that this rank carries, itself first.
    pub fn sources(&self) -> &[usize] {
        self.network.sources()
    }

    /// What carries messages.
    pub fn transport(&self) -> Result<Arc<dyn Transport>> {
        self.network.transport()
    }

    /// Ends it for `error`.
    pub fn fail(&self, error: &Error) {
        self.network.fail(error);
    }

    /// How many nodes before this rank's the one of `rank` is.
    pub fn distance(&self, rank: usize) -> usize {
        self.network.topology().distance(self.network.rank(), rank)
    }

    /// Bound of tokens per rank.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// What kernels need of the network: where messages lie, `sums`, which go where rows of sources came from, and
    /// `weights`; and the number of the handle and the most tokens of a source.
    pub fn nodes(
        &self,
        (sums, weights): (&Leg, &Leg),
        (handle, most_tokens): (u32, u32),
    ) -> Result<LlNodes> {
        let tables = &self.tables;
        Ok(LlNodes {
            of_rank: tables.of_rank.0 as *const LlRankOnNode,
            rank_of_peer: tables.rank_of_peer.0 as *const u32,
            rank_of_source: tables.rank_of_source.0 as *const u32,
            gateways: tables.gateways.0 as *const u32,
            rows: sums.sends.0 as *mut u8,
            weights: weights.receives.0 as *const u8,
            returned: sums.receives.0 as *const u8,
            rows_stride: sums.stride as u64,
            weights_stride: weights.stride as u64,
            ranks: to_u32(self.network.topology().ranks())?,
            rank: to_u32(self.network.rank())?,
            sources: to_u32(self.sources().len())?,
            most_tokens,
            handle,
            other_nodes: to_u32(self.network.topology().nodes() - 1)?,
            own_place: own_place(self.network.topology(), self.network.rank())?,
        })
    }

    /// The name of `op`, in its turn among the group's operations: each takes one, when nothing refuses it any more.
    pub fn label(&self, op: &LlOp) -> Label {
        Label {
            what: match op {
                LlOp::Dispatch(_) => "LL dispatch",
                LlOp::Combine(_) => "LL combine",
            },
            number: self.operations.fetch_add(1, Ordering::Relaxed) + 1,
        }
    }

    /// Enqueues an exchange on `stream`: `fill` is given the gateways and the lists of what is sent and received.
    pub fn exchange(
        &self,
        label: Label,
        fill: impl FnOnce(&[usize], &mut Vec<Message>, &mut Vec<Message>),
        stream: Stream,
    ) -> Result<()> {
        let transport = self.transport()?;
        let mut messages = self.messages.lock();
        let Messages { sends, receives } = &mut *messages;
        sends.clear();
        receives.clear();
        fill(transport.gateways(), sends, receives);
        transport.exchange(label, sends, receives, stream)
    }

    /// Where the background enqueues what belongs to an operation at `at`. It does not follow `at` yet. Refuses a capture if
    /// too many are open.
    pub fn background_of(&self, at: &StreamScope) -> Result<StreamScope> {
        at.of_same_capture(self.background.of(at.capture)?)
    }

    /// The background's stream outside of graphs.
    pub fn background(&self) -> Stream {
        self.background.outside()
    }
}

impl Tables {
    fn new(memory: &Arc<CudaMemory>, network: &Network) -> Result<Self> {
        let topology = network.topology();
        let rank = network.rank();
        let local = topology.local_ranks(rank);
        let words = |ranks: &[usize]| -> Result<Vec<u32>> {
            ranks.iter().map(|&rank| to_u32(rank)).collect()
        };
        let of_rank = ranks_on_node(topology, rank)?;
        let of_rank: Vec<u32> = of_rank
            .iter()
            .flat_map(|it| [it.peer.cast_unsigned(), it.carrier, it.number, it.distance])
            .collect();
        let (_buffer, [of_rank, rank_of_peer, rank_of_source, gateways]) = Buffer::of_tables(
            memory,
            [
                &of_rank,
                &words(local.ranks())?,
                &words(network.sources())?,
                &words(&topology.gateways_by_distance(rank))?,
            ],
        )?;
        Ok(Self {
            _buffer,
            of_rank,
            rank_of_peer,
            rank_of_source,
            gateways,
        })
    }
}

/// Where each rank of the group is, as `rank` and the others of its node see them.
fn ranks_on_node(topology: &Topology, rank: usize) -> Result<Vec<LlRankOnNode>> {
    let local = topology.local_ranks(rank);
    // Each rank of the group has one carrier here, itself if it is on this node.
    let mut places = vec![None; topology.ranks()];
    for (carrier, &carrying) in local.ranks().iter().enumerate() {
        for (index, source) in topology.carried_by(carrying).into_iter().enumerate() {
            let place = LlRankOnNode {
                peer: match source == carrying {
                    true => to_u32(carrier)?.cast_signed(),
                    false => -1,
                },
                carrier: to_u32(carrier)?,
                number: to_u32(index)?,
                distance: to_u32(topology.distance(rank, source))?,
            };
            if let Some(found) = places.get_mut(source) {
                *found = Some(place);
            }
        }
    }
    let placed = |place: Option<_>| place.ok_or_else(|| Error::internal("no carrier"));
    places.into_iter().map(placed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::topology::NodeId;

    #[test]
    fn every_rank_has_a_carrier_that_carries_it() {
        for names in ["ab", "aabb", "abab", "aaba", "abc", "aabcc"] {
            let ids: Vec<NodeId> = names
                .chars()
                .map(|it| NodeId::from_text(&it.to_string()))
                .collect();
            let topology = Topology::from_ids(&ids);
            for rank in 0..topology.ranks() {
                let local = topology.local_ranks(rank);
                for (other, place) in ranks_on_node(&topology, rank).unwrap().iter().enumerate() {
                    let carrier = local.rank(place.carrier as usize);
                    let carried = topology.carried_by(carrier);
                    assert_eq!(carried.get(place.number as usize), Some(&other), "{names}");
                    assert_eq!(place.peer >= 0, place.distance == 0);
                    assert_eq!(place.number == 0, place.distance == 0);
                    assert_eq!(carrier, topology.carrier(other, topology.node_of(rank)));
                    let peer = local
                        .index(other)
                        .map_or(-1, |it| i32::try_from(it).unwrap());
                    assert_eq!(place.peer, peer, "{names}");
                    let distance = topology.distance(rank, other);
                    assert_eq!(place.distance as usize, distance, "{names}");
                }
            }
        }
    }
}

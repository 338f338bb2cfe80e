//! Drops rows for which a rank has no room. After routing, ranks exchange how many rows of each source they keep, and
//! each source removes the dropped ones from its ids. If any rank drops rows, all route again.

use crate::backend::cuda::driver;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::nodes::part::Part;
use crate::backend::cuda::ht::nodes::rails::Rails;
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::kernels::{self, LaunchShape, to_u32};
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht_nodes::{HT_ROOM_DROPS, HT_ROOM_THREADS, HtRoomNodesParams};
use crate::backend::net::two_sided::{Label, Message};
use crate::error::Result;
use crate::model::room::Room;
use crate::model::tensor::DevPtr;

const WORD: usize = size_of::<u32>();
const ID: usize = size_of::<i64>();

/// A handle after its first routing, which was the group's routing number `epoch`.
pub struct Cut<'a> {
    pub group: &'a HtShared,
    pub rails: &'a Rails,
    pub part: &'a Part,
    pub epoch: u32,
    pub at: &'a StreamScope,
}

impl Cut<'_> {
    /// Removes rows beyond the first `most` of each rank from the handle's copy of the ids. Returns whether any rank
    /// drops rows; all ranks get the same answer.
    pub fn cut(&self, most: usize, label: Label) -> Result<bool> {
        let turn = self.group.order.begin(self.at)?;
        turn.end_after(self.exchange_kept_rows(most, label))?;
        let first = self.rails.plan.announced() + 1;
        let kept = (0..self.rails.plan.ranks).map(|rank| {
            let page = &self.part.memory.announced;
            let read = || Ok(page.complete(first + rank, |it| it.epoch == self.epoch));
            Ok(self.group.wait_for_routing(read)?.value)
        });
        let kept: Vec<u32> = kept.collect::<Result<_>>()?;
        let drops = kept.iter().any(|word| word & HT_ROOM_DROPS != 0);
        if drops {
            self.take_out(Room::new(
                kept.iter().map(|word| i64::from(word & !HT_ROOM_DROPS)).collect(),
                self.rails.plan.local_experts,
            ))?;
        }
        Ok(drops)
    }

    /// Enqueues the messages and the kernel by which ranks exchange how many rows they keep.
    fn exchange_kept_rows(&self, most: usize, label: Label) -> Result<()> {
        let (group, rails, view) = (self.group, self.rails, &self.rails.network.view);
        let memory = self.part.device(&rails.plan)?;
        let bytes = rails.plan.ranks * (rails.plan.chunks + 1) * WORD;
        let arrived = rails.ids_for(view.remote().len() * bytes)?;
        let own = DevPtr(memory.received_rows as usize);
        let sends = view.rail_peers.iter().map(|&peer| Message { peer, data: own, bytes });
        let place = |index| DevPtr(arrived.data().0 + index * bytes);
        let from = view.remote().iter().enumerate();
        let receives = from.map(|(index, &peer)| Message { peer, data: place(index), bytes });
        rails.network.exchanges.enqueue(label, sends, receives, self.at.stream)?;
        let params = HtRoomNodesParams {
            peers: *group.context.peers(),
            wait: group.context.wait(KernelOp::HtRoute),
            packets: group.plan.packets(&group.layout),
            nodes: rails.nodes()?,
            received_rows: memory.received_rows,
            arrived: arrived.data().0 as *const u32,
            kept: self.part.memory.announced.device().wrapping_add(rails.plan.announced() + 1),
            limit: to_u32(most)?,
            epoch: self.epoch,
        };
        group.context.module.launch(kernels::ht_room_nodes(), LaunchShape::new(1, HT_ROOM_THREADS), &params, self.at)
    }

    fn take_out(&self, mut room: Room) -> Result<()> {
        let routing = &self.part.routing;
        let mut bytes = vec![0; routing.tokens * routing.top_k * ID];
        driver::download(&mut bytes, routing.ids, self.at.stream)?;
        let mut drops = false;
        for of_token in bytes.chunks_exact_mut(routing.top_k.max(1) * ID) {
            let mut ids: Vec<i64> = of_token.as_chunks().0.iter().map(|id| i64::from_ne_bytes(*id)).collect();
            drops |= room.take(&mut ids);
            for (to, id) in of_token.as_chunks_mut().0.iter_mut().zip(ids) {
                *to = id.to_ne_bytes();
            }
        }
        if drops { driver::upload(routing.ids, &bytes, self.at.stream) } else { Ok(()) }
    }
}

//! Opens a transport over NCCL: collective on all ranks of the caller's communicator, which carries the id of the new
//! one.

use crate::backend::bootstrap::Bootstrap;
use crate::backend::detached;
use crate::backend::nccl::ID_BYTES;
use crate::backend::nccl::network::Network;
use crate::backend::nccl::own::OwnCommunicator;
use crate::backend::net::OnFault;
use crate::backend::net::two_sided::Transport;
use crate::backend::net::two_sided::ending::Untaken;
use crate::backend::net::two_sided::members::{Members, comm_of};
use crate::backend::net::two_sided::outstanding::Outstanding;
use crate::backend::net::two_sided::over_nccl::NcclTransport;
use crate::backend::net::two_sided::replays::NewReplayMarks;
use crate::backend::net::two_sided::spare::{OFFER_BYTES, Offer, in_common};
use crate::error::{Code, Error, Result};
use crate::model::ids::GroupRank;
use crate::model::node_view::NodeView;
use crate::model::ops::Stream;
use std::sync::Arc;
use std::time::Duration;

/// The parameters of a transport.
pub struct Wanted<'a> {
    /// The ranks of the communicator on their nodes.
    pub view: &'a Arc<NodeView>,
    /// The deadline of each operation.
    pub timeout: Duration,
    /// The most blocks of an NCCL kernel; each block fills a multiprocessor.
    pub most_blocks: usize,
    /// The most bytes of a message, the same on all ranks.
    pub most_bytes: usize,
    /// Told of a failure, even while the transport is being opened.
    pub on_fault: Arc<dyn OnFault>,
    /// Creates marks on the device.
    pub new_replay_marks: NewReplayMarks<'a>,
}

/// Opens a transport and warms it up; every rank gets one, or every rank an error.
pub fn over_nccl(bootstrap: &Bootstrap, wanted: Wanted<'_>, stream: Stream) -> Result<Box<dyn Transport>> {
    let members = Members::new(Arc::clone(wanted.view));
    let most_bytes = wanted.most_bytes;
    // While connecting, ranks also wait for each other on their devices.
    let _under_way = bootstrap.device().begin();
    let comm = match spare_of_all(bootstrap, &members, stream)? {
        Some(comm) => Ok(comm),
        None => {
            let (network, id) = common_id(bootstrap, &members, stream)?;
            connect(bootstrap, network, id, &members, wanted.most_blocks)
        }
    };
    let device = Arc::clone(bootstrap.device());
    let opened = comm.and_then(|comm| {
        let outstanding = Outstanding::new(wanted.new_replay_marks)?;
        let (timeout, on_fault) = (wanted.timeout, wanted.on_fault);
        NcclTransport::new(members, comm, device, outstanding, timeout, on_fault)
    });
    let transport = agreed(bootstrap, opened, stream)?;
    let warmed = bootstrap.within_most(|limit| transport.warm_up(most_bytes, limit, stream));
    agreed(bootstrap, warmed.map(|()| transport), stream).map(|transport| Box::new(transport) as Box<dyn Transport>)
}

/// A communicator left by an earlier group, if all ranks of this one have kept theirs.
fn spare_of_all(bootstrap: &Bootstrap, members: &Members, stream: Stream) -> Result<Option<Untaken>> {
    let device = bootstrap.device();
    let mut offer = Offer::new(&**device, members.place()?);
    let offers = bootstrap.agree(Ok(offer.to_bytes()), OFFER_BYTES, stream)?;
    let of = |rank: &GroupRank| offers.get(rank.index()).map(Vec::as_slice);
    let common = |ranks: &[GroupRank]| {
        let offers: Vec<_> = ranks.iter().filter_map(of).collect();
        in_common(&offers)
    };
    let topology = &members.view.topology;
    let all_have = GroupRank::all(topology.ranks()).all(|rank| common(&comm_of(topology, rank)).is_some());
    let comm = common(&members.ranks).filter(|_| all_have).and_then(|tag| offer.take(tag));
    Ok(comm.map(|comm| Untaken::new(comm, Arc::clone(device))))
}

/// The id of a new communicator.
fn common_id(bootstrap: &Bootstrap, members: &Members, stream: Stream) -> Result<(Network, [u8; ID_BYTES])> {
    let network = Network::of_process();
    let ids = bootstrap.agree(own_id(&network, members), ID_BYTES, stream)?;
    let id = members.ranks.first().and_then(|root| ids.get(root.index()));
    let id = id.and_then(|id| id.as_slice().try_into().ok());
    Ok((network?, id.ok_or_else(|| Error::internal("no id of a communicator"))?))
}

/// The new id if this rank is the first member of its communicator; otherwise nothing.
fn own_id(network: &Result<Network>, members: &Members) -> Result<Vec<u8>> {
    let network = network.as_ref().map_err(Error::clone)?;
    if members.ranks.first() == Some(&members.view.rank) {
        Ok(network.new_id()?.to_vec())
    } else {
        Ok(vec![0; ID_BYTES])
    }
}

/// Joins the new communicator.
fn connect(
    bootstrap: &Bootstrap,
    network: Network,
    id: [u8; ID_BYTES],
    members: &Members,
    most_blocks: usize,
) -> Result<Untaken> {
    let (ranks, rank) = members.place()?;
    let device = Arc::clone(bootstrap.device());
    let connect = move || {
        let comm = OwnCommunicator::join(network, &id, ranks, rank, most_blocks, Arc::clone(&device))?;
        Ok(Untaken::new(Arc::new(comm), device))
    };
    bootstrap.within_most(|limit| {
        let late = || {
            let text = format!(
                "deadline passed: {} waited {} ms to connect with {}",
                members.own_name(),
                limit.as_millis(),
                members.names(&members.ranks)
            );
            Err(Error::new(Code::RemoteError, text))
        };
        detached::within(limit, connect)?.unwrap_or_else(late)
    })
}

/// `mine`, if all ranks have theirs.
fn agreed(bootstrap: &Bootstrap, mine: Result<NcclTransport>, stream: Stream) -> Result<NcclTransport> {
    let agreed = bootstrap.agree(mine.as_ref().map(|_| Vec::new()).map_err(Error::clone), 0, stream);
    if agreed.is_err()
        && let Ok(transport) = &mine
    {
        // Dropping it would end it collectively, and others do not join in.
        transport.abort();
    }
    agreed.and(mine)
}

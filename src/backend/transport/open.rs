//! Opening a transport over NCCL: collective among all ranks of the caller's communicator, which carries the id of
//! the new one.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::detached;
use crate::backend::nccl::ID_BYTES;
use crate::backend::nccl::network::Network;
use crate::backend::nccl::own::OwnCommunicator;
use crate::backend::transport::ending::Untaken;
use crate::backend::transport::members::Members;
use crate::backend::transport::over_nccl::{Device, NcclTransport};
use crate::backend::transport::{OnFault, Transport, ending};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::topology::Topology;
use std::sync::Arc;
use std::time::Duration;

/// What a transport is opened with.
pub struct Wanted<'a> {
    /// The ranks of the communicator on their nodes.
    pub topology: &'a Topology,
    /// The device of this rank, as this process numbers it.
    pub device: usize,
    /// The deadline of each operation.
    pub timeout: Duration,
    /// The most blocks of a kernel of NCCL, each of which fills a multiprocessor.
    pub most_blocks: usize,
    /// The most bytes of a message, the same on all ranks.
    pub most_bytes: usize,
    /// Told of a failure, also of one while the transport is opened.
    pub on_fault: Arc<dyn OnFault>,
}

/// Opens a transport and warms it up; every rank gets one, or every rank an error.
pub fn over_nccl(
    bootstrap: &Bootstrap,
    wanted: Wanted<'_>,
    stream: Stream,
) -> Result<Box<dyn Transport>> {
    let members = Members::new(wanted.topology, bootstrap.rank());
    let most_bytes = wanted.most_bytes;
    let network = Network::of_process();
    let ids = bootstrap.agree(own_id(&network, &members), ID_BYTES, stream)?;
    // Before the exchange begins, as the device is not quiet from then on.
    ending::end_kept();
    // While ranks connect they wait for each other on their devices, too.
    let _under_way = bootstrap.memory().begin();
    let joined = join(bootstrap, network?, &ids, members, wanted);
    let transport = agreed(bootstrap, joined, stream)?;
    let warmed = within_most(bootstrap, |limit| {
        transport.warm_up(most_bytes, limit, stream)
    });
    agreed(bootstrap, warmed.map(|()| transport), stream)
        .map(|transport| Box::new(transport) as Box<dyn Transport>)
}

/// The id of the communicator whose first member this rank is; otherwise nothing.
fn own_id(network: &Result<Network>, members: &Members) -> Result<Vec<u8>> {
    let network = network.as_ref().map_err(Error::clone)?;
    match members.ranks.first() == Some(&members.rank) {
        true => Ok(network.new_id()?.to_vec()),
        false => Ok(vec![0; ID_BYTES]),
    }
}

fn join(
    bootstrap: &Bootstrap,
    network: Network,
    ids: &[Vec<u8>],
    members: Members,
    wanted: Wanted<'_>,
) -> Result<NcclTransport> {
    let id = members.ranks.first().and_then(|&root| ids.get(root));
    let id: [u8; ID_BYTES] = id
        .and_then(|id| id.as_slice().try_into().ok())
        .ok_or_else(|| Error::internal("no id of a communicator"))?;
    let place = (members.ranks.len(), members.comm_rank(members.rank)?);
    let device = Device {
        number: wanted.device,
        memory: Arc::clone(bootstrap.memory()),
    };
    let on = device.clone();
    let most_blocks = wanted.most_blocks;
    let connect = move || {
        let memory = Arc::clone(&on.memory);
        let enter_device = Arc::new(move || on.enter());
        let comm = OwnCommunicator::join(network, &id, place, most_blocks, enter_device)?;
        Ok(Untaken::new(comm, memory))
    };
    let comm = within_most(bootstrap, |limit| {
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
    })?;
    NcclTransport::new(members, comm, device, wanted.timeout, wanted.on_fault)
}

/// Runs `wait`, which is told how long it may wait: not to the deadline of the call, so that ranks can still
/// tell each other why it failed.
fn within_most<T>(bootstrap: &Bootstrap, wait: impl FnOnce(Duration) -> T) -> T {
    bootstrap.within_deadline(|left| wait(left * 3 / 4))
}

/// `mine` if all ranks have theirs.
fn agreed(
    bootstrap: &Bootstrap,
    mine: Result<NcclTransport>,
    stream: Stream,
) -> Result<NcclTransport> {
    let verdict = mine.as_ref().map(|_| Vec::new()).map_err(Error::clone);
    let agreed = bootstrap.agree(verdict, 0, stream);
    if agreed.is_err()
        && let Ok(transport) = &mine
    {
        // Its end would be a collective that others do not join.
        transport.abort();
    }
    agreed.and(mine)
}

//! Creation of groups and handles: the collective calls.
//!
//! A rank that refuses its arguments still takes part in the exchange, so that the others learn of it
//! and return an error instead of waiting.
#![forbid(unsafe_code)]

use crate::abi::read::GroupConfig;
use crate::backend::bootstrap::Bootstrap;
use crate::backend::nccl::Communicator;
use crate::backend::{DeviceMemory, HtRouting, OpenGroup, select};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::model::group::{GroupFacts, LlCombineMode};
use crate::model::ops::{Routing, Stream};
use crate::model::tensor::{DevPtr, Tensor, TensorSet};
use crate::model::topology::{NODE_ID_BYTES, NodeId, Topology};
use crate::request;
use crate::request::handle::Counter;
use crate::state::group::Group;
use crate::state::handle::Handle;
use crate::state::tensors::TensorAllocator;
use std::sync::Arc;

/// Makes the allocator of a group's tensors from the device's memory.
pub type AllocatorFor<'a> = &'a dyn Fn(Arc<dyn DeviceMemory>) -> Arc<dyn TensorAllocator>;

/// Opens a group over the communicator at address `comm`. `config` is an error if it could not even be read.
pub fn group(
    comm: usize,
    config: Result<GroupConfig>,
    stream: Stream,
    allocator_for: AllocatorFor<'_>,
) -> Result<Group> {
    let env = Env::read();
    let comm = Communicator::open(comm)?;
    let platform = select::platform(&comm)?;
    let memory = platform.memory();
    let (ranks, rank) = (comm.ranks, comm.rank);
    let facts =
        config.and_then(|config| request::group::check(&config, env.ll_combine, ranks, rank));
    let bootstrap = Bootstrap::new(comm, Arc::clone(&memory), env.timeout);
    let facts = agree_on_facts(&bootstrap, facts, &env, stream)?;
    let backend = platform.open(facts, bootstrap, env.timeout, stream)?;
    Ok(Group::new(facts, backend, allocator_for(memory)))
}

/// The numbers that must be the same on every rank.
const COMPARED: [&str; 5] = [
    "config.algorithm",
    "config.num_experts",
    "config.max_tokens_per_rank",
    "config.token_size_bytes",
    LL_COMBINE,
];
const LL_COMBINE: &str = "NCCL_EP_LL_COMBINE";
const NUMBER_BYTES: usize = 8;

fn agree_on_facts(
    bootstrap: &Bootstrap,
    facts: Result<GroupFacts>,
    env: &Env,
    stream: Stream,
) -> Result<GroupFacts> {
    let mine = facts.as_ref().map_err(Error::clone).and_then(|facts| {
        let mut record = Vec::new();
        for number in compared(facts) {
            record.extend_from_slice(&number.to_le_bytes());
        }
        record.extend_from_slice(&node_id(env)?.0);
        Ok(record)
    });
    let bytes = COMPARED.len() * NUMBER_BYTES + NODE_ID_BYTES;
    let records = bootstrap.agree(mine, bytes, stream)?;
    let facts = facts?;
    let mut nodes = Vec::new();
    for (rank, record) in records.iter().enumerate() {
        let (numbers, node) = record.split_at(COMPARED.len() * NUMBER_BYTES);
        nodes.push(NodeId(
            node.try_into()
                .map_err(|_| Error::internal("a short node id"))?,
        ));
        for ((name, mine), theirs) in COMPARED
            .iter()
            .zip(compared(&facts))
            .zip(numbers.chunks_exact(NUMBER_BYTES))
        {
            if theirs != mine.to_le_bytes() {
                let theirs = theirs
                    .iter()
                    .rev()
                    .fold(0_u64, |n, &byte| n << 8 | u64::from(byte));
                return Err(Error::argument(
                    name,
                    format_args!("must be the same on every rank, but rank {rank} differs"),
                )
                .got(
                    shown(name, mine),
                    format_args!("{} as on rank {rank}", shown(name, theirs)),
                ));
            }
        }
    }
    single_node(&nodes)?;
    Ok(facts)
}

fn compared(facts: &GroupFacts) -> [u64; COMPARED.len()] {
    [
        u64::from(facts.algorithm as u32),
        facts.experts as u64,
        facts.max_tokens.unwrap_or(0) as u64,
        facts.row_bytes as u64,
        u64::from(facts.ll_combine as u32),
    ]
}

/// One of the numbers as callers know it.
fn shown(name: &str, number: u64) -> String {
    let mode = LlCombineMode::ALL
        .into_iter()
        .find(|&mode| u64::from(mode as u32) == number);
    match mode {
        Some(mode) if name == LL_COMBINE => mode.name().to_owned(),
        _ => number.to_string(),
    }
}

fn node_id(env: &Env) -> Result<NodeId> {
    const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
    match &env.host_id {
        Some(id) => Ok(NodeId::from_text(id)),
        None => std::fs::read_to_string(BOOT_ID)
            .map(|id| NodeId::from_text(&id))
            .map_err(|cause| Error::system(BOOT_ID, &cause)),
    }
}

fn single_node(nodes: &[NodeId]) -> Result<()> {
    let topology = Topology::from_ids(nodes);
    match topology.first_remote_rank() {
        None => Ok(()),
        Some(rank) => Err(Error::usage(
            "comm",
            format_args!("groups that span nodes are not supported yet; rank {rank} is on another node than rank 0"),
        )
        .got(format_args!("{} nodes", topology.nodes()), "1 node")),
    }
}

/// What a caller passes to make a handle: ids with their tag, local tensors, and whether the
/// arguments could be read at all.
pub struct HandleArguments {
    /// Tag and copy of the ids' descriptor.
    pub topk_idx: (u32, Tensor),
    /// Counters.
    pub locals: TensorSet,
}

/// Opens a handle on `group`; collective in HT.
pub fn handle(
    group: Arc<Group>,
    arguments: Result<HandleArguments>,
    stream: Stream,
) -> Result<Handle> {
    group.check_usable()?;
    let checked = arguments.and_then(|arguments| {
        let (tag, ids) = &arguments.topk_idx;
        let routing = request::handle::routing(group.facts(), *tag, ids)?;
        Ok((
            routing,
            request::handle::counter(group.facts(), &arguments.locals)?,
        ))
    });
    match group.backend() {
        OpenGroup::Ll(backend) => {
            let (routing, _) = checked?;
            let handle = backend.open_handle(routing)?;
            Ok(Handle::low_latency(group, routing, handle))
        }
        OpenGroup::Ht(backend) => {
            let routing = checked
                .as_ref()
                .map(|(routing, _)| *routing)
                .map_err(Error::clone);
            let wanted = checked.and_then(|checked| ht_routing(&group, checked));
            let handle = backend.open_handle(wanted, stream)?;
            Ok(Handle::high_throughput(group, routing?, handle))
        }
    }
}

fn ht_routing(group: &Group, (routing, counter): (Routing, Option<Counter>)) -> Result<HtRouting> {
    let counter = match counter {
        None => None,
        Some(Counter::Device(data)) => Some(data),
        Some(Counter::Host(host)) => Some(device_alias(group, host)?),
    };
    Ok(HtRouting { routing, counter })
}

/// The address by which the device reaches the counter at `host`.
fn device_alias(group: &Group, host: DevPtr) -> Result<DevPtr> {
    group
        .backend()
        .common()
        .memory()
        .device_alias(host)
        .map_err(|cause| {
            Error::argument(
                "local_tensors[RECV_EXPERT_COUNTER_HOST].data",
                "must be mapped pinned host memory",
            )
            .got(cause, "an address that the device can reach")
        })
}

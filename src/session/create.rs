//! Collective creation of groups and handles.
//!
//! A rank that refuses its arguments still takes part in the exchange, so the others learn of it
//! and return an error instead of waiting.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::nccl::Communicator;
use crate::backend::own_stream::OwnStream;
use crate::backend::select;
use crate::env::Env;
use crate::error::refusal::{AmongRanks, Setting, Subject};
use crate::error::{Error, Result, Words};
use crate::fork;
use crate::log;
use crate::model::group::{Algorithm, GroupFacts, GroupSettings, LlCombineMode, NodeSums};
use crate::model::ops::Stream;
use crate::model::topology::{NODE_ID_BYTES, NodeId, Topology};
use crate::rule;
use crate::rule::handle::HandleTensors;
use crate::session::about::About;
use crate::session::check::Checks;
use crate::session::group::Group;
use crate::session::handle::Handle;
use std::sync::Arc;

/// Opens a group over the communicator at address `comm`. `settings` is an error if they could not
/// be read; `words` puts errors into words for other ranks. Without a stream, the exchanges run on
/// one that the group owns.
pub fn group(
    comm: usize,
    settings: Result<GroupSettings>,
    words: Words,
    stream: Option<Stream>,
) -> Result<Group> {
    let env = Env::read();
    let comm = Communicator::open(comm)?;
    fork::watch();
    let platform = select::platform(&comm)?;
    let memory = platform.memory();
    let own_stream = match stream {
        Some(_) => Ok(None),
        None => OwnStream::new(Arc::clone(&memory)).map(Some),
    };
    let own = own_stream.iter().flatten().next().map(OwnStream::stream);
    // A rank that got no stream tells the others so, on whichever stream that runs.
    let stream = stream.or(own).unwrap_or(Stream::DEFAULT);
    let (ranks, rank) = (comm.ranks, comm.rank);
    let facts = own_stream.as_ref().map_err(Error::clone).and_then(|_| {
        let settings = settings?;
        rule::group::check(&settings, env.ll_combine, ranks, rank)
    });
    let bootstrap = Bootstrap::new(comm.clone(), memory, env.timeout, words);
    let (facts, topology) = agree_on_facts(&bootstrap, facts, &env, stream)?;
    let nodes = topology.nodes();
    let backend = platform.open((facts, topology), bootstrap, env.timeout, stream)?;
    let profile = backend.common().profile();
    let about = || About::new(&comm, (facts, nodes), profile, &env);
    let about = log::tells_of_groups().then(about);
    let checks = Checks::wanted(&env, &facts, backend.common().memory());
    Ok(Group::new(facts, backend, own_stream?, about, checks))
}

/// The numbers that must be the same on every rank.
const COMPARED: [Setting; 7] = [
    Setting::Algorithm,
    Setting::Experts,
    Setting::MaxTokens,
    Setting::RowBytes,
    Setting::LlCombine,
    Setting::NodeSums,
    Setting::HtChunkBytes,
];
const NUMBER_BYTES: usize = 8;

fn agree_on_facts(
    bootstrap: &Bootstrap,
    facts: Result<GroupFacts>,
    env: &Env,
    stream: Stream,
) -> Result<(GroupFacts, Topology)> {
    let mine = facts.as_ref().map_err(Error::clone).and_then(|facts| {
        let mut record = Vec::new();
        for number in compared(facts, env) {
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
        for ((setting, mine), theirs) in COMPARED
            .into_iter()
            .zip(compared(&facts, env))
            .zip(numbers.chunks_exact(NUMBER_BYTES))
        {
            if theirs != mine.to_le_bytes() {
                let theirs = theirs
                    .iter()
                    .rev()
                    .fold(0_u64, |n, &byte| n << 8 | u64::from(byte));
                return Err(differs(setting, rank, mine, theirs));
            }
        }
    }
    let topology = Topology::from_ids(&nodes).with_sums(env.node_sums);
    rule::group::check_nodes(&facts, &topology)?;
    Ok((facts, topology))
}

/// The refusal of `setting`, which is `mine` here and `theirs` on `rank`.
fn differs(setting: Setting, rank: usize, mine: u64, theirs: u64) -> Error {
    Error::argument(Subject::Setting(setting), AmongRanks::Same { rank }).got(
        shown(setting, mine),
        format_args!("{} as on rank {rank}", shown(setting, theirs)),
    )
}

fn compared(facts: &GroupFacts, env: &Env) -> [u64; COMPARED.len()] {
    let chunk_bytes = match facts.algorithm {
        Algorithm::LowLatency => None,
        Algorithm::HighThroughput => env.ht_chunk_bytes,
    };
    [
        u64::from(facts.algorithm as u32),
        facts.experts as u64,
        facts.max_tokens.unwrap_or(0) as u64,
        facts.row_bytes as u64,
        u64::from(facts.ll_combine as u32),
        u64::from(env.node_sums as u32),
        chunk_bytes.unwrap_or(0) as u64,
    ]
}

/// A compared number as callers know it.
fn shown(setting: Setting, number: u64) -> String {
    let is = |it: u32| u64::from(it) == number;
    let name = match setting {
        Setting::Algorithm => [Algorithm::LowLatency, Algorithm::HighThroughput]
            .into_iter()
            .find(|&it| is(it as u32))
            .map(Algorithm::name),
        Setting::LlCombine => LlCombineMode::ALL
            .into_iter()
            .find(|&it| is(it as u32))
            .map(LlCombineMode::name),
        Setting::NodeSums => NodeSums::ALL
            .into_iter()
            .find(|&it| is(it as u32))
            .map(NodeSums::name),
        Setting::HtChunkBytes => is(0).then_some("unset"),
        _ => None,
    };
    name.map_or_else(|| number.to_string(), str::to_owned)
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

/// Creates a handle on `group` with a routing; collective in HT. `tensors` is an error if they
/// could not be read.
pub fn handle(group: Arc<Group>, tensors: Result<HandleTensors>, stream: Stream) -> Result<Handle> {
    let handle = Handle::new(group);
    handle.update(tensors, stream)?;
    Ok(handle)
}

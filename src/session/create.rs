//! Collective creation of groups and handles.
//!
//! A rank that refuses its arguments still takes part in the exchange, so that other ranks return an error instead of
//! waiting for it.

use crate::backend::bootstrap::Bootstrap;
use crate::backend::device::{Device, OwnStream};
use crate::backend::nccl::Communicator;
use crate::backend::{Profile, RankChoices, select};
use crate::env::Env;
use crate::error::refusal::{AmongRanks, Setting, Subject};
use crate::error::{Code, Error, Formatter, Result};
use crate::model::group::{Algorithm, GroupFacts, GroupSettings, LlCombineMode, NodeSums};
use crate::model::ids::GroupRank;
use crate::model::ops::{HandleForm, Stream};
use crate::model::topology::{NODE_ID_BYTES, NodeId, Topology};
use crate::rule::handle::HandleTensors;
use crate::session::about::About;
use crate::session::check::Checks;
use crate::session::group::{Group, check_not_captured};
use crate::session::handle::Handle;
use crate::tuning::Tuning;
use crate::{fork, log, rule};
use std::sync::Arc;
use std::time::Duration;

/// The default timeout of waits for other ranks.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(100);

/// Opens a group over the communicator at address `comm`. `settings` is an error if they could not be read. `formatter`
/// formats errors for other ranks. Without a stream, exchanges run on one that the group owns.
pub fn group(
    comm: usize,
    settings: Result<GroupSettings>,
    formatter: Formatter,
    stream: Option<Stream>,
) -> Result<Group> {
    let (env, unused) = Env::read_and_check();
    unused.iter().for_each(log::in_vain);
    let comm = Communicator::open(comm)?;
    fork::watch();
    let platform = select::platform(&comm)?;
    let device = platform.device();
    stream.map_or(Ok(()), |stream| check_not_captured(device.as_ref(), stream))?;
    let _entered = device.enter()?;
    let own_stream = match stream {
        Some(_) => Ok(None),
        None => OwnStream::new(Arc::clone(&device)).map(Some),
    };
    let own = own_stream.iter().flatten().next().map(|own| own.stream);
    // If the group's own stream could not be created, other ranks learn of it through the default stream.
    let stream = stream.or(own).unwrap_or(Stream::DEFAULT);
    let (ranks, rank) = (comm.ranks, comm.rank);
    let requested = settings.iter().find_map(|settings| settings.timeout);
    let facts = own_stream.as_ref().map_err(Error::clone).and_then(|_| {
        let settings = settings?;
        check_sms(&settings, device.as_ref())?;
        let ll_combine = env.ll_combine.unwrap_or(settings.ll_combine);
        rule::group::check(&GroupSettings { ll_combine, ..settings }, env.ht_chunk_bytes, ranks, rank)
    });
    let read = |path: &String| {
        let gpu = device.name().map_err(|error| error.to_string());
        Tuning::read(path, gpu, ranks, device.multiprocessors())
    };
    let Tuning { shapes, choices: learned } = env.tuning_file.as_ref().map(read).unwrap_or_default();
    let of_rank = RankChoices {
        timeout: env.timeout.or(requested).unwrap_or(DEFAULT_TIMEOUT),
        tuning_file: env.tuning_file.clone(),
        shapes,
        check: env.check,
        programmatic: env.programmatic,
    };
    let timeout = of_rank.timeout;
    let bootstrap = Bootstrap::new(comm.clone(), device, timeout, formatter);
    let (facts, topology) = agree_on_facts(&bootstrap, facts, &env, stream)?;
    let nodes = topology.nodes();
    let backend = platform.open(facts, topology, bootstrap, &of_rank, stream)?;
    let about = log::tells_of_groups().then(|| {
        let profile = backend.common.profile();
        let tuned = profile.tuned || !learned.is_empty();
        let (backend, sums, choices) = (Profile { tuned, ..profile }, env.node_sums, of_rank);
        About { device: comm.device, facts, nodes, sums, nccl: comm.library(), backend, choices }
    });
    let checks = Checks::from_env(&env, &facts, timeout, backend.common.device());
    Ok(Group::new(facts, nodes, backend, own_stream?, about, checks, learned))
}

/// The SMs of the device that a group over the communicator at address `comm` would use; `None` on the CPU. For
/// decisions that precede the settings.
pub fn multiprocessors(comm: usize) -> Result<Option<u32>> {
    let platform = select::platform(&Communicator::open(comm)?)?;
    Ok(platform.device().multiprocessors())
}

fn check_sms(settings: &GroupSettings, device: &dyn Device) -> Result<()> {
    match (settings.sms, device.multiprocessors()) {
        (Some(requested), Some(all)) if requested > all as usize => {
            let text = "more SMs are asked for than the device has";
            Err(Error::new(Code::InvalidUsage, text).got(requested, format_args!("at most {all}")))
        }
        _ => Ok(()),
    }
}

/// How many numbers must be the same on all ranks.
const COMPARED: usize = 9;
const NUMBER_BYTES: usize = 8;

fn agree_on_facts(
    bootstrap: &Bootstrap,
    facts: Result<GroupFacts>,
    env: &Env,
    stream: Stream,
) -> Result<(GroupFacts, Topology)> {
    let mine = facts.as_ref().map_err(Error::clone).and_then(|facts| {
        let mut record = Vec::new();
        for (_, number) in compared(facts, env) {
            record.extend_from_slice(&number.to_le_bytes());
        }
        record.push(u8::from(env.ll_combine.is_some()));
        record.extend_from_slice(&node_id(env)?.0);
        Ok(record)
    });
    let records = bootstrap.agree(mine, COMPARED * NUMBER_BYTES + 1 + NODE_ID_BYTES, stream)?;
    let facts = facts?;
    let (mut nodes, mut is_combine_asked) = (Vec::new(), false);
    for (rank, record) in GroupRank::all(records.len()).zip(&records) {
        let (numbers, rest) = record.split_at(COMPARED * NUMBER_BYTES);
        let (asked, node) = rest.split_at(1);
        is_combine_asked |= asked != [0];
        nodes.push(NodeId(node.try_into().map_err(|_| Error::internal("a short node id"))?));
        for ((setting, mine), theirs) in compared(&facts, env).into_iter().zip(numbers.as_chunks().0) {
            let theirs = u64::from_le_bytes(*theirs);
            if theirs != mine {
                return Err(differs(setting, rank, mine, theirs));
            }
        }
    }
    let topology = Topology::from_ids(&nodes).with_sums(env.node_sums);
    let facts = match is_combine_asked {
        // Over several nodes combines always reduce. Where the environment of a rank says otherwise, all get an error.
        false if topology.nodes() > 1 => GroupFacts { ll_combine: LlCombineMode::Reduce, ..facts },
        _ => facts,
    };
    rule::group::check_nodes(&facts, &topology)?;
    Ok((facts, topology))
}

/// The error that `setting` is `mine` here but `theirs` on `rank`.
fn differs(setting: Setting, rank: GroupRank, mine: u64, theirs: u64) -> Error {
    Error::argument(Subject::Setting(setting), AmongRanks::Same { rank })
        .got(shown(setting, mine), format_args!("{} as on rank {rank}", shown(setting, theirs)))
}

/// The settings that must be the same on all ranks, as numbers.
fn compared(facts: &GroupFacts, env: &Env) -> [(Setting, u64); COMPARED] {
    [
        (Setting::Algorithm, u64::from(facts.algorithm as u32)),
        (Setting::Experts, facts.experts as u64),
        (Setting::MaxTokens, facts.max_tokens.unwrap_or(0) as u64),
        (Setting::RecvRows, facts.tensor_rows as u64),
        (Setting::Overflow, u64::from(facts.drops)),
        (Setting::RowBytes, facts.row_bytes as u64),
        (Setting::LlCombine, u64::from(facts.ll_combine as u32)),
        (Setting::NodeSums, u64::from(env.node_sums as u32)),
        (Setting::HtChunkBytes, facts.ht_chunk_bytes.unwrap_or(0) as u64),
    ]
}

/// A compared number, in the form that callers know.
fn shown(setting: Setting, number: u64) -> String {
    let raw = u32::try_from(number).unwrap_or(u32::MAX);
    let named = match setting {
        Setting::Algorithm => Algorithm::from_raw(raw).map(Algorithm::name),
        Setting::LlCombine => LlCombineMode::from_raw(raw).map(LlCombineMode::name),
        Setting::NodeSums => NodeSums::from_raw(raw).map(NodeSums::name),
        Setting::HtChunkBytes if number == 0 => Some("unset"),
        Setting::Overflow => Some(if number == 0 { "trap" } else { "drop" }),
        Setting::MaxTokens | Setting::RecvRows if number == 0 => Some("no bound"),
        _ => None,
    };
    named.map_or_else(|| number.to_string(), str::to_owned)
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

/// Creates a handle on `group` with a routing; collective in HT. `tensors` is an error if they could not be read.
pub fn handle(group: Arc<Group>, form: HandleForm, tensors: Result<HandleTensors>, stream: Stream) -> Result<Handle> {
    let handle = Handle::new(group, form);
    handle.update(tensors, stream)?;
    Ok(handle)
}

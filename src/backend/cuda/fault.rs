//! What the kernels report when another rank does not come, or comes with something else.
#![forbid(unsafe_code)]

use crate::backend::Faults;
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::HostPage;
use crate::backend::cuda::params::common::{
    FAULT_EXPERT_ROWS, FAULT_GATEWAY_FAILED, FAULT_HANDLE_DIFFERS, FAULT_INPUT_ROWS, FAULT_NONE,
    FAULT_PEER_FAILED, FAULT_ROUTING_ROWS, FAULT_SCALE_ROWS, FAULT_STAGED_DIFFERS,
    FAULT_TOKEN_ROWS, FaultReport, OP_HT_COMBINE, OP_HT_DISPATCH, OP_HT_ROUTE, OP_LL_COMBINE,
    OP_LL_DISPATCH, OP_PEER_SELFTEST, WAIT_ACK, WAIT_BEGIN, WAIT_COUNTS, WAIT_CREDIT, WAIT_ENTRY,
    WAIT_PATTERN, WAIT_ROW, WAIT_STREAMED_ROW, WAIT_WEIGHT, WaitParams,
};
use crate::backend::cuda::params::ht_nodes::HT_RANK_OF_GROUP;
use crate::backend::cuda::scaled_rows::ScalesWord;
use crate::error::refusal::{AmongRanks, OfTensor, Operation, Role, Subject};
use crate::error::{Code, Context as Circumstance, Error, Result, Value};
use crate::model::scales::RowBytes;
use crate::model::tensor::DevPtr;
use crate::model::topology::LocalRanks;
use once_cell::sync::OnceCell;
use std::sync::Arc;
use std::time::Duration;

/// The failure that a report states in words of the group's mode; none if it is in others.
pub type OfMode = fn(&FaultReport) -> Option<Error>;

/// The one report of a group, and the deadline of its waits.
#[derive(Debug)]
pub struct FaultPage {
    page: HostPage<FaultReport>,
    /// The ranks that kernels number by their local index.
    ranks: LocalRanks,
    timeout: Duration,
    of_mode: OfMode,
    /// The failure of the network between nodes.
    network: OnceCell<Error>,
}

impl FaultPage {
    /// An empty report of one of `ranks`, the ranks of its node.
    pub fn new(
        context: &Arc<Context>,
        ranks: LocalRanks,
        timeout: Duration,
        of_mode: OfMode,
    ) -> Result<Self> {
        Ok(Self {
            page: HostPage::new(context, 1)?,
            ranks,
            timeout,
            of_mode,
            network: OnceCell::new(),
        })
    }

    /// The network between nodes has failed. The first failure counts: kernels report others, as what they receive
    /// from now on is undefined.
    pub fn network_failed(&self, error: &Error) {
        if self.report().is_none() {
            let _ = self.network.set(error.clone());
        }
    }

    fn report(&self) -> Option<FaultReport> {
        self.page.complete(0, |it| it.state != FAULT_NONE)
    }

    /// What the waits of kernel `op` need; `failed` and `peer_failed` are the group's marks in device memory.
    pub fn wait_params(&self, op: u32, failed: DevPtr, peer_failed: DevPtr) -> WaitParams {
        WaitParams {
            timeout_ns: nanoseconds(self.timeout),
            report: self.page.device(),
            failed: failed.0 as *mut u32,
            peer_failed: peer_failed.0 as *mut u32,
            op,
        }
    }

    /// How long a wait may last.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The rank that a kernel waited for. Those of HT number this node's ranks by their local index.
    fn peer(&self, report: &FaultReport) -> u32 {
        match report.op {
            OP_HT_ROUTE | OP_HT_DISPATCH | OP_HT_COMBINE => {
                let local = || self.ranks.rank(report.peer as usize);
                match report.peer & HT_RANK_OF_GROUP {
                    0 => u32::try_from(local()).unwrap_or(report.peer),
                    _ => report.peer & !HT_RANK_OF_GROUP,
                }
            }
            _ => report.peer,
        }
    }

    fn lateness(&self, report: &FaultReport) -> Error {
        let failed = match report.state {
            FAULT_PEER_FAILED => Some(self.ranks.rank(report.got as usize)),
            FAULT_GATEWAY_FAILED => Some(report.got as usize),
            _ => None,
        };
        let why = failed.map_or("deadline passed".to_owned(), |rank| {
            format!("rank {rank} failed")
        });
        let peer = report.peer;
        let awaited = match report.what {
            WAIT_STREAMED_ROW | WAIT_CREDIT => format!(
                "{} of operation {} of rank {peer}, whose last one is {} or not complete",
                what_name(report.what),
                report.expected,
                report.expected.wrapping_sub(1)
            ),
            what if failed.is_some() => {
                let name = what_name(what);
                format!("{name} of operation {} of rank {peer}", report.expected)
            }
            what => format!(
                "{} of operation {} of rank {peer}, whose last one is {}",
                what_name(what),
                report.expected,
                report.got
            ),
        };
        let text = format!(
            "{why}: rank {} waited {} ms for {awaited}",
            self.ranks.own_rank(),
            report.waited_ms
        );
        Error::new(Code::RemoteError, text)
    }
}

impl Faults for FaultPage {
    fn first(&self) -> Option<Error> {
        if let Some(error) = self.network.get() {
            return Some(error.clone());
        }
        let report = self.report()?;
        let report = FaultReport {
            peer: self.peer(&report),
            ..report
        };
        let error = match report.state {
            FAULT_STAGED_DIFFERS => differs(&report, Subject::Staging),
            FAULT_HANDLE_DIFFERS => {
                differs(&report, Subject::Handle).got(report.expected, report.got)
            }
            FAULT_TOKEN_ROWS => too_few_rows(Role::TokensOut, &report),
            FAULT_SCALE_ROWS => too_few_rows(Role::ScalesOut, &report),
            FAULT_ROUTING_ROWS => too_few_rows(Role::IdsOut, &report),
            FAULT_INPUT_ROWS => too_few_rows(Role::TokensIn, &report),
            FAULT_EXPERT_ROWS => repeated_ids(&report),
            _ => (self.of_mode)(&report).unwrap_or_else(|| self.lateness(&report)),
        };
        Some(match operation(report.op) {
            Some(operation) => error.during(Circumstance::Running(operation)),
            None => error.within(other_name(report.op)),
        })
    }
}

/// A time as kernels take it.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A tensor of received rows must hold them all: silently losing tokens would be worse.
fn too_few_rows(role: Role, report: &FaultReport) -> Error {
    Error::usage(Subject::Size(role, 0), OfTensor::HoldsAllReceived)
        .got(report.got, format_args!("{} or more", report.expected))
}

/// The repeated ids of a rank take slots of an expert that others need.
fn repeated_ids(report: &FaultReport) -> Error {
    let rule = AmongRanks::RoomForRepeated {
        rank: report.peer as usize,
        expert: report.what as usize,
    };
    Error::usage(Subject::Tensor(Role::Ids), rule)
        .got(report.got, format_args!("at most {}", report.expected))
}

/// What two ranks do not agree on in the bytes of their rows, or in their scales, if anything.
pub fn other_rows(report: &FaultReport, mine: usize, theirs: usize) -> Option<Error> {
    let [our_scales, their_scales] = [report.expected_scales, report.got_scales].map(ScalesWord);
    let bytes = |payload, scales: ScalesWord| RowBytes {
        payload,
        scales: scales.bytes(),
    };
    let (mine, theirs) = (bytes(mine, our_scales), bytes(theirs, their_scales));
    if mine != theirs {
        let [mine, theirs] = RowBytes::in_words(mine, theirs);
        return Some(differs(report, Subject::RowBytes).got(mine, theirs));
    }
    (our_scales != their_scales).then(|| {
        let (mine, theirs) = (our_scales.type_name(), their_scales.type_name());
        differs(report, Subject::ScaleType).got(mine, theirs)
    })
}

/// `subject` is another here than on the rank of the report.
pub fn differs(report: &FaultReport, subject: Subject) -> Error {
    let rank = report.peer as usize;
    Error::usage(subject, AmongRanks::Same { rank })
}

/// What was waiting, if a caller asked for it.
fn operation(op: u32) -> Option<Operation> {
    match op {
        OP_LL_DISPATCH => Some(Operation::LlDispatch),
        OP_LL_COMBINE => Some(Operation::LlCombine),
        OP_HT_ROUTE => Some(Operation::HtHandle),
        OP_HT_DISPATCH => Some(Operation::HtDispatch),
        OP_HT_COMBINE => Some(Operation::HtCombine),
        _ => None,
    }
}

/// What else was waiting.
fn other_name(op: u32) -> String {
    match op {
        OP_PEER_SELFTEST => "peer self test".to_owned(),
        other => format!("operation {other}"),
    }
}

/// Operation `op` in a text.
pub fn op_value(op: u32) -> Value {
    operation(op).map_or_else(|| Value::Text(other_name(op)), Value::Operation)
}

/// What did not come.
fn what_name(what: u32) -> &'static str {
    match what {
        WAIT_PATTERN => "the data",
        WAIT_COUNTS => "the row counts",
        WAIT_ENTRY => "the places",
        WAIT_ROW => "a row",
        WAIT_WEIGHT => "the weights",
        WAIT_BEGIN => "the begin",
        WAIT_ACK => "the release",
        WAIT_CREDIT => "a free place for a row",
        WAIT_STREAMED_ROW => "a row",
        _ => "something",
    }
}

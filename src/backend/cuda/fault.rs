//! Kernels' fault reports, from which errors are made: a rank did not come, or does not agree with this one.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::HostPage;
use crate::backend::cuda::params::common::{Fault, FaultReport, KernelOp, Wait, WaitParams};
use crate::backend::cuda::params::ht_nodes::HT_RANK_OF_GROUP;
use crate::backend::cuda::scaled_rows::ScalesWord;
use crate::backend::{Faults, foreign_state, too_few_rows};
use crate::error::refusal::{AmongRanks, Operation, Role, Subject};
use crate::error::{Code, Context as Circumstance, Error, Result, Value};
use crate::model::ids::{GroupRank, LocalRank};
use crate::model::node_view::NodeView;
use crate::model::scales::RowBytes;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::sync::Arc;
use std::time::Duration;

/// Makes the error of a report whose meaning depends on the group's mode; `None` for other reports.
pub type ErrorOfMode = fn(&FaultReport) -> Option<Error>;

/// The host page that holds a group's fault report, of which there is only one, and the timeout of its waits.
#[derive(Debug)]
pub struct FaultPage {
    page: HostPage<FaultReport>,
    /// Translates kernels' local ranks to ranks of the group.
    view: Arc<NodeView>,
    pub timeout: Duration,
    of_mode: ErrorOfMode,
    /// HT: the most rows of a tensor in the caller's ABI; 0 if unlimited.
    tensor_rows: usize,
    /// The failure of the network between nodes.
    network: OnceCell<Error>,
}

impl FaultPage {
    /// A page without a report, of the rank that sees `view`.
    pub fn new(
        context: &Arc<Context>,
        view: Arc<NodeView>,
        timeout: Duration,
        of_mode: ErrorOfMode,
        tensor_rows: usize,
    ) -> Result<Self> {
        Ok(Self { page: HostPage::new(context, 1)?, view, timeout, of_mode, tensor_rows, network: OnceCell::new() })
    }

    /// Records that the network between nodes has failed, unless a kernel has already reported: after either failure
    /// what kernels receive is undefined, so only the first one counts.
    pub fn network_failed(&self, error: &Error) {
        if self.report().is_none() {
            let _ = self.network.set(error.clone());
        }
    }

    fn report(&self) -> Option<FaultReport> {
        self.page.complete(0, |it| it.state != Fault::None as u32)
    }

    /// The parameters of the waits of kernel `op`; `failed` and `peer_failed` are the group's marks in device memory.
    pub fn wait_params(&self, op: KernelOp, failed: DevPtr, peer_failed: DevPtr) -> WaitParams {
        WaitParams {
            timeout_ns: nanoseconds(self.timeout),
            report: self.page.device(),
            failed: failed.0 as *mut u32,
            peer_failed: peer_failed.0 as *mut u32,
            op,
        }
    }

    /// The rank that a kernel waited for. HT kernels number this node's ranks by local index.
    fn peer(&self, report: &FaultReport) -> GroupRank {
        match KernelOp::from_raw(report.op) {
            Some(KernelOp::HtRoute | KernelOp::HtDispatch | KernelOp::HtCombine)
                if report.peer & HT_RANK_OF_GROUP == 0 =>
            {
                self.view.rank_of(LocalRank::from(report.peer))
            }
            _ => GroupRank::from(report.peer & !HT_RANK_OF_GROUP),
        }
    }

    fn too_few_rows(&self, role: Role, report: &FaultReport) -> Error {
        too_few_rows(role, (report.got as usize, report.expected as usize), self.tensor_rows)
    }

    fn lateness(&self, report: &FaultReport) -> Error {
        let failed = match Fault::from_raw(report.state) {
            Some(Fault::PeerFailed) => Some(self.view.rank_of(LocalRank::from(report.got))),
            Some(Fault::RailPeerFailed) => Some(GroupRank::from(report.got)),
            _ => None,
        };
        let why = failed.map_or("deadline passed".to_owned(), |rank| format!("rank {rank} failed"));
        let FaultReport { peer, expected, got, waited_ms, .. } = *report;
        if failed.is_some() && expected == 0 {
            return Error::new(Code::RemoteError, format!("{why} before the handle's state was written"));
        }
        let what = Wait::from_raw(report.what);
        let last = match what {
            Some(Wait::StreamedRow | Wait::Credit) => {
                format!(", whose last one is {} or not complete", expected.wrapping_sub(1))
            }
            _ if failed.is_some() => String::new(),
            _ => format!(", whose last one is {got}"),
        };
        let awaited = format!("{} of operation {expected} of rank {peer}{last}", wait_name(what));
        let text = format!("{why}: rank {} waited {waited_ms} ms for {awaited}", self.view.rank);
        Error::new(Code::RemoteError, text)
    }
}

impl Faults for FaultPage {
    fn first(&self) -> Option<Error> {
        if let Some(error) = self.network.get() {
            return Some(error.clone());
        }
        let report = self.report()?;
        let report = FaultReport { peer: self.peer(&report).word(), ..report };
        let error = match Fault::from_raw(report.state) {
            Some(Fault::StagedDiffers) => differs(&report, Subject::Staging),
            Some(Fault::HandleDiffers) => differs(&report, Subject::Handle).got(report.expected, report.got),
            Some(Fault::TokenRows) => self.too_few_rows(Role::TokensOut, &report),
            Some(Fault::ScaleRows) => self.too_few_rows(Role::ScalesOut, &report),
            Some(Fault::RoutingRows) => self.too_few_rows(Role::IdsOut, &report),
            Some(Fault::WeightRows) => self.too_few_rows(Role::WeightsOut, &report),
            Some(Fault::InputRows) => self.too_few_rows(Role::TokensIn, &report),
            Some(Fault::GradientRows) => self.too_few_rows(Role::WeightsIn, &report),
            Some(Fault::ExpertRows) => repeated_ids(&report),
            Some(Fault::ForeignState) => foreign_state(report.what, report.got, report.expected),
            _ => (self.of_mode)(&report).unwrap_or_else(|| self.lateness(&report)),
        };
        Some(match operation(report.op) {
            Some(operation) => error.during(Circumstance::Running(operation)),
            None => error.within(internal_op_name(report.op)),
        })
    }
}

/// A time in the kernels' unit.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The error if a rank repeats ids: the entries take slots of the expert that other ranks need.
fn repeated_ids(report: &FaultReport) -> Error {
    let rule = AmongRanks::RoomForRepeated { rank: GroupRank::from(report.peer), expert: report.what as usize };
    Error::usage(Subject::Tensor(Role::Ids), rule).got(report.got, format_args!("at most {}", report.expected))
}

/// The error if two ranks disagree on the bytes of rows or on scales, from their words `mine` and `theirs`.
pub fn other_rows(report: &FaultReport, mine: usize, theirs: usize) -> Option<Error> {
    let [our_scales, their_scales] = [report.expected_scales, report.got_scales].map(ScalesWord);
    let bytes = |payload, scales: ScalesWord| RowBytes { payload, scales: scales.bytes() };
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

/// The error if `subject` differs between this rank and the reported one.
pub fn differs(report: &FaultReport, subject: Subject) -> Error {
    Error::usage(subject, AmongRanks::Same { rank: GroupRank::from(report.peer) })
}

/// The operation that waited; `None` if the caller did not call it, such as a self-test.
fn operation(op: u32) -> Option<Operation> {
    match KernelOp::from_raw(op)? {
        KernelOp::LlDispatch => Some(Operation::LlDispatch),
        KernelOp::LlCombine => Some(Operation::LlCombine),
        KernelOp::HtRoute => Some(Operation::HtHandle),
        KernelOp::HtDispatch => Some(Operation::HtDispatch),
        KernelOp::HtCombine => Some(Operation::HtCombine),
        KernelOp::PeerSelftest => None,
    }
}

/// The name of an internal operation that waited.
fn internal_op_name(op: u32) -> String {
    match KernelOp::from_raw(op) {
        Some(KernelOp::PeerSelftest) => "peer self test".to_owned(),
        _ => format!("operation {op}"),
    }
}

/// Operation `op`, as error texts name it.
pub fn op_value(op: u32) -> Value {
    operation(op).map_or_else(|| Value::Text(internal_op_name(op)), Value::Operation)
}

/// The name of what the kernel waited for.
fn wait_name(what: Option<Wait>) -> &'static str {
    match what {
        Some(Wait::Pattern) => "the data",
        Some(Wait::Counts) => "the row counts",
        Some(Wait::Entry) => "the places",
        Some(Wait::Row | Wait::StreamedRow) => "a row",
        Some(Wait::Weight) => "the weights",
        Some(Wait::Begin) => "the begin",
        Some(Wait::Ack) => "the release",
        Some(Wait::Credit) => "a free place for a row",
        None => "something",
    }
}

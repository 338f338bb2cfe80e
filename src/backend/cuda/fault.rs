//! What the kernels report when a wait for another rank reached its deadline.
#![forbid(unsafe_code)]

use crate::backend::cuda::context::Context;
use crate::backend::cuda::host_page::HostPage;
use crate::backend::cuda::params::{
    FAULT_RECORDED, FaultReport, OP_LL_COMBINE, OP_LL_DISPATCH, OP_PEER_SELFTEST, WAIT_ACK,
    WAIT_COUNTS, WAIT_ENTRY, WAIT_HELLO, WAIT_PATTERN, WAIT_ROW, WAIT_WEIGHT, WaitParams,
};
use crate::error::{Code, Error, Result};
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// The one report of a group, and the deadline of its waits.
#[derive(Debug)]
pub(super) struct FaultPage {
    page: HostPage<FaultReport>,
    rank: usize,
    timeout: Duration,
}

impl FaultPage {
    /// An empty report of `rank`.
    pub(super) fn new(context: &Arc<Context>, rank: usize, timeout: Duration) -> Result<Self> {
        Ok(Self {
            page: HostPage::new(context, 1)?,
            rank,
            timeout,
        })
    }

    /// What the waits of kernel `op` need; `failed` is the group's mark in device memory.
    pub(super) fn wait_params(&self, op: u32, failed: DevPtr) -> WaitParams {
        WaitParams {
            timeout_ns: u64::try_from(self.timeout.as_nanos()).unwrap_or(u64::MAX),
            report: self.page.device(),
            failed: failed.0 as *mut u32,
            op,
        }
    }

    /// The first wait that failed.
    pub(super) fn error(&self) -> Option<Error> {
        let seen = self.page.read(0)?;
        if seen.state != FAULT_RECORDED {
            return None;
        }
        // The kernel wrote `state` last, so what is read from here on is complete.
        fence(Ordering::Acquire);
        let report = self.page.read(0)?;
        let text = format!(
            "{}: deadline passed: rank {} waited {} ms for {} of operation {} of rank {}, whose last one \
             is {}",
            op_name(report.op),
            self.rank,
            self.timeout.as_millis(),
            what_name(report.what),
            report.expected,
            report.peer,
            report.got,
        );
        Some(Error::new(Code::RemoteError, text))
    }
}

/// What was waiting.
fn op_name(op: u32) -> String {
    match op {
        OP_PEER_SELFTEST => "peer self test".to_owned(),
        OP_LL_DISPATCH => "ncclEpDispatch (low latency)".to_owned(),
        OP_LL_COMBINE => "ncclEpCombine (low latency)".to_owned(),
        other => format!("operation {other}"),
    }
}

/// What did not come.
fn what_name(what: u32) -> &'static str {
    match what {
        WAIT_PATTERN => "the data",
        WAIT_COUNTS => "the row counts",
        WAIT_ENTRY => "the places",
        WAIT_ROW => "a row",
        WAIT_WEIGHT => "the weights",
        WAIT_HELLO => "the begin",
        WAIT_ACK => "the release",
        _ => "something",
    }
}

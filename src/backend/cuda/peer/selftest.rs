//! Runs `cuda/selftest.cu` when a group opens, so that failures of mapping, ordering or launching are reported while
//! all ranks still take part.

use crate::backend::cuda::driver;
use crate::backend::cuda::driver::memory::HostPage;
use crate::backend::cuda::driver::module::Module;
use crate::backend::cuda::kernels;
use crate::backend::cuda::kernels::LaunchShape;
use crate::backend::cuda::params::common::{
    PeerSelftestParams, PeerTable, SELFTEST_MISMATCH, SELFTEST_MISSING, SELFTEST_PASSED, SELFTEST_THREADS,
    SELFTEST_TIMEOUT, SelftestResult, WaitParams,
};
use crate::backend::cuda::peer::layout::WindowLayout;
use crate::error::{Code, Error, Result};
use crate::model::ids::GroupRank;
use crate::model::node_view::NodeView;
use crate::model::ops::Stream;

/// The value of flags that have arrived. It need not change, as windows are zero when the test runs.
const EPOCH: u32 = 1;

/// Exchanges a pattern with every rank, and waits for the results; `results` has one per rank. Collective.
pub fn run(
    results: &HostPage<SelftestResult>,
    module: &Module,
    peers: &PeerTable,
    view: &NodeView,
    layout: &WindowLayout,
    wait: WaitParams,
    stream: Stream,
) -> Result<()> {
    let params = PeerSelftestParams {
        peers: *peers,
        wait,
        flags_offset: layout.selftest_flags as u64,
        slots_offset: layout.selftest_slots as u64,
        results: results.device(),
        epoch: EPOCH,
    };
    let shape = LaunchShape::new(peers.ranks, SELFTEST_THREADS);
    let _under_way = module.context.quiescence.begin();
    let at = module.enter(stream)?;
    module.launch(kernels::peer_selftest(), shape, &params, &at)?;
    driver::synchronize_stream(stream)?;
    let mut peers = view.locals.iter().enumerate();
    peers.try_for_each(|(index, &peer)| judge(view.rank, peer, results.read(index)))
}

/// The result of `rank`'s test of `peer`, as an error unless it passed.
fn judge(rank: GroupRank, peer: GroupRank, result: Option<SelftestResult>) -> Result<()> {
    let fail = |code, what| Err(Error::new(code, format!("peer self test: rank {rank} {what} rank {peer}")));
    let result = result.unwrap_or(SelftestResult { outcome: SELFTEST_MISSING, wrong_threads: 0 });
    match result.outcome {
        SELFTEST_PASSED => Ok(()),
        SELFTEST_TIMEOUT => fail(Code::RemoteError, "got no answer in time from"),
        SELFTEST_MISMATCH => fail(Code::InternalError, "received wrong data from")
            .map_err(|error: Error| error.got(result.wrong_threads, "0 threads that saw it")),
        SELFTEST_MISSING => fail(Code::InternalError, "has no verdict on"),
        other => Err(Error::internal(format!("peer self test: unknown outcome {other}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(outcome: u32) -> Result<()> {
        judge(GroupRank::new(2), GroupRank::new(5), Some(SelftestResult { outcome, wrong_threads: 3 }))
    }

    #[test]
    fn only_a_passed_test_passes() {
        assert_eq!(verdict(SELFTEST_PASSED), Ok(()));
        for outcome in [SELFTEST_MISSING, SELFTEST_MISMATCH, SELFTEST_TIMEOUT, 17] {
            assert!(verdict(outcome).is_err());
        }
        assert!(judge(GroupRank::new(0), GroupRank::new(0), None).is_err());
    }

    #[test]
    fn a_silent_peer_is_a_remote_error_that_names_it() {
        let error = verdict(SELFTEST_TIMEOUT).unwrap_err();
        assert_eq!(error.code(), Code::RemoteError);
        assert_eq!(error.text(), "peer self test: rank 2 got no answer in time from rank 5");
    }
}

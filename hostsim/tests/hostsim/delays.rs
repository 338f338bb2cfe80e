//! Random delays: every kind of operation has them, and none goes wrong by them.

use std::time::{Duration, Instant};

use ncclep_hostsim::nccl::api::*;

use crate::failures::gather;
use crate::kit::{Buffer, Rank, run};

const SUCCESS: i32 = 0;
const DELAY: &str = "NCCLEP_HOSTSIM_DELAY_US";
const SEED: &str = "NCCLEP_HOSTSIM_DELAY_SEED";

#[test]
fn everything_works_with_delays() {
    for (scenario, ranks) in [
        ("every_collective", 3),
        ("split_by_parity", 5),
        ("exchange_with_all", 3),
        ("ping_pong", 2),
        ("many_communicators", 2),
    ] {
        run(scenario, ranks, &[(DELAY, "300"), (SEED, "7")]);
    }
}

#[test]
fn operations_are_delayed() {
    run("count_delays", 1, &[(DELAY, "10000")]);
}

/// The mean of a delay is 5 ms. A collective has two of them, at its begin and its end; messages of
/// one line have one each, and they add up.
pub(crate) fn count_delays() {
    const TIMES: usize = 20;
    let me = Rank::from_environment();
    let begin = Instant::now();
    let buffers = [(); TIMES].map(|()| gather(&me, 8));
    assert_eq!(me.stream.synchronize(), SUCCESS);
    let collectives = begin.elapsed();
    assert!(collectives > Duration::from_millis(100), "{collectives:?}");
    let (to, from) = (Buffer::new(8), Buffer::new(8));
    let begin = Instant::now();
    assert_eq!(ncclGroupStart(), SUCCESS);
    for _ in 0..TIMES {
        me.send(&from, 8, 0);
        me.receive(&to, 8, 0);
    }
    assert_eq!(ncclGroupEnd(), SUCCESS);
    assert_eq!(me.stream.synchronize(), SUCCESS);
    let messages = begin.elapsed();
    assert!(messages > Duration::from_millis(60), "{messages:?}");
    drop((buffers, to, from));
    me.end();
}

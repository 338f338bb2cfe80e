//! Random delays: every kind of operation has them. `kit::run_also_late` tests that they cause no errors.

use std::time::{Duration, Instant};

use ncclep_hostsim::nccl::api::*;

use crate::codes::*;
use crate::failures::gather;
use crate::kit::{Buffer, run};

/// The mean delay is 5 ms. A collective has two, at its begin and end; messages of one line have one each, and they add
/// up.
#[test]
fn operations_are_delayed() {
    run(1, &[("NCCLEP_HOSTSIM_DELAY_US", "10000")], |me| {
        const TIMES: usize = 20;
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
    });
}

//! Sends and receives: sizes, order, when a message begins; random delays, of collectives too.

use std::time::{Duration, Instant};

use ncclep_hostsim::nccl::api::*;

use crate::failures::{BRIEFLY, await_failure, count, expect_failure, gather};
use crate::kit::*;

const SIZES: &str = "HOSTSIM_TEST_SIZES";
/// More than one chunk of a mailbox.
const LARGE: usize = 700_001;

#[test]
fn sizes_that_differ_fail_on_both_sides() {
    for (sent, wanted) in [(8, 9), (9, 8), (0, 8), (8, 0), (LARGE, LARGE - 1)] {
        let sizes = format!("{sent} {wanted}");
        let said = run(2, &[(SIZES, &sizes)], |me| {
            let sizes = std::env::var(SIZES).expect("set");
            let mut sizes = sizes.split(' ').map(|size| size.parse().expect("a number"));
            let bytes = sizes.nth(me.rank).expect("a size per rank");
            let buffer = Buffer::new(LARGE);
            match me.rank {
                0 => me.send(&buffer, bytes, 1),
                _ => me.receive(&buffer, bytes, 0),
            }
            assert_eq!(me.stream.synchronize(), LAUNCH_FAILURE);
            drop(buffer);
            expect_failure(me, INVALID_USAGE);
        });
        let line = format!("ncclSend of {sent} bytes on rank 0 meets ncclRecv of {wanted} bytes on rank 1");
        assert_eq!(count(&said, &line), 1, "{said}");
        assert_eq!(count(&said, "hostsim:"), 1, "{said}");
    }
}

/// All send two messages to all, in one group; the second one from rank 2 to rank 0 is too long.
#[test]
fn a_wrong_size_among_right_ones_is_found() {
    let said = run(3, &[], |me| {
        let buffer = Buffer::new(100);
        assert_eq!(ncclGroupStart(), SUCCESS);
        for peer in 0..me.ranks {
            for bytes in [3, 5] {
                let wrong = (me.rank, peer, bytes) == (2, 0, 5);
                me.send(&buffer, if wrong { 7 } else { bytes }, peer);
                me.receive(&buffer, bytes, peer);
            }
        }
        // Rank 1 has only right messages: it completes them, or gives up when the others fail, which may be before it
        // has begun.
        let begun = ncclGroupEnd();
        assert!(begun == SUCCESS || me.rank == 1 && begun == INVALID_USAGE, "{begun}");
        let code = me.stream.synchronize();
        assert!(code == LAUNCH_FAILURE || me.rank == 1, "{code}");
        await_failure(me.comm);
        drop(buffer);
        expect_failure(me, INVALID_USAGE);
    });
    let line = "ncclSend of 7 bytes on rank 2 meets ncclRecv of 5 bytes on rank 0";
    assert_eq!(count(&said, line), 1, "{said}");
}

/// Rank 0 sends numbered messages, every fifth of them empty, to both others in groups of ten; rank 1
/// receives them in groups of four, rank 2 one by one.
#[test]
fn messages_of_a_pair_keep_their_order() {
    run_also_late(3, |me| {
        const MESSAGES: usize = 40;
        let size = |number: usize| if number % 5 == 4 { 0 } else { 1 + number * 10 };
        let value = |number: usize| if me.rank == 0 { number as u8 } else { 0xEE };
        let buffers: Vec<_> = (0..MESSAGES).map(|number| Buffer::filled(size(number), value(number))).collect();
        let numbers: Vec<usize> = (0..MESSAGES).collect();
        for group in numbers.chunks([10, 4, 1][me.rank]) {
            assert_eq!(ncclGroupStart(), SUCCESS);
            for &number in group {
                let (buffer, bytes) = (&buffers[number], size(number));
                match me.rank {
                    0 => [1, 2].into_iter().for_each(|peer| me.send(buffer, bytes, peer)),
                    _ => me.receive(buffer, bytes, 0),
                }
            }
            assert_eq!(ncclGroupEnd(), SUCCESS);
        }
        assert_eq!(me.stream.synchronize(), SUCCESS);
        for (number, buffer) in buffers.iter().enumerate() {
            assert!(buffer.bytes() == vec![number as u8; size(number)], "{number}");
        }
        drop(buffers);
        me.end();
    });
}

/// The receive is in a blocked stream: the send waits, however small it is.
#[test]
fn a_message_begins_when_both_have_come() {
    run(2, &[], |me| {
        let news = me.duplicate();
        let buffer = Buffer::filled(8, me.rank as u8);
        let token = Buffer::new(1);
        if me.rank == 0 {
            for bytes in [8, 0] {
                me.send(&buffer, bytes, 1);
            }
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(me.stream.query(), NOT_READY);
            news.send(&token, 1, 1);
            assert_eq!(news.stream.synchronize(), SUCCESS);
        } else {
            let gate = Gate::holding(me.stream.0);
            for bytes in [8, 0] {
                me.receive(&buffer, bytes, 0);
            }
            // Not before the sender has checked.
            news.receive(&token, 1, 0);
            assert_eq!(news.stream.synchronize(), SUCCESS);
            gate.open();
        }
        assert_eq!(me.stream.synchronize(), SUCCESS);
        assert_eq!(buffer.bytes(), [0; 8]);
        drop((buffer, token));
        news.end();
        me.end();
    });
}

#[test]
fn an_empty_message_needs_its_receive() {
    let said = run(2, &[BRIEFLY], |me| {
        let buffer = Buffer::new(1);
        if me.rank == 0 {
            me.send(&buffer, 0, 1);
            assert_eq!(me.stream.synchronize(), LAUNCH_TIMEOUT);
        } else {
            await_failure(me.comm);
        }
        drop(buffer);
        expect_failure(me, REMOTE_ERROR);
    });
    assert_eq!(count(&said, "ncclSend/ncclRecv waited 2."), 1, "{said}");
    assert_eq!(count(&said, "not arrived: rank 1 of 2"), 1, "{said}");
}

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

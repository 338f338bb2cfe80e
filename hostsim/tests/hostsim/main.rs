//! Tests of the stand-ins through the functions that C programs call.
//!
//! One test program, so that it can start itself again as the ranks of a communicator and as
//! victims that must crash (`kit`): `child_process` is their entry point.

// Clippy's leave for tests reaches only the test functions themselves, not their helpers.
#![allow(clippy::expect_used, clippy::panic)]

mod aborts;
mod collectives;
mod communicators;
mod data;
mod delays;
mod failures;
mod graphs;
mod groups;
mod kit;
mod memory;
mod messages;
mod streams;
mod surface;

/// What a child process can be told to do.
const SCENARIOS: &[(&str, fn())] = &[
    ("every_collective", collectives::every_collective),
    ("split_by_parity", groups::split_by_parity),
    ("exchange_with_all", groups::exchange_with_all),
    ("ping_pong", groups::ping_pong),
    ("one_rank_stays_away", failures::one_rank_stays_away),
    ("one_rank_dies", failures::one_rank_dies),
    ("counts_differ", failures::counts_differ),
    ("one_rank_aborts", aborts::one_rank_aborts),
    ("one_rank_aborts_in_a_group", aborts::one_rank_aborts_in_a_group),
    ("abort_frees_streams", aborts::abort_frees_streams),
    ("abort_frees_host_calls", aborts::abort_frees_host_calls),
    ("first_operations_connect", aborts::first_operations_connect),
    ("one_rank_leaves", aborts::one_rank_leaves),
    ("many_communicators", communicators::many_communicators),
    ("two_at_once", communicators::two_at_once),
    ("sizes_differ", messages::sizes_differ),
    ("one_message_differs", messages::one_message_differs),
    ("messages_in_order", messages::messages_in_order),
    ("sender_comes_first", messages::sender_comes_first),
    ("empty_without_receive", messages::empty_without_receive),
    ("count_delays", delays::count_delays),
    ("one_rank_never_joins", failures::one_rank_never_joins),
    ("beside_a_driver", surface::beside_a_driver),
    ("write_past_the_end", memory::write_past_the_end),
    ("write_before_the_start", memory::write_before_the_start),
    ("read_after_free", memory::read_after_free),
    ("write_into_the_padding", memory::write_into_the_padding),
    ("reset_the_device", streams::reset_the_device),
    ("lanes_keep_their_order", graphs::lanes_keep_their_order),
    ("a_graph_owns_what_it_is_given", graphs::a_graph_owns_what_it_is_given),
    ("rules_of_captures", graphs::rules_of_captures),
    ("the_end_of_a_communicator", graphs::the_end_of_a_communicator),
    ("messages_in_graphs", graphs::messages_in_graphs),
];

/// Not a test of its own: what a child process runs, see `kit::start`.
#[test]
#[ignore = "entry point of child processes"]
fn child_process() {
    let Some(wanted) = kit::scenario() else {
        return;
    };
    let scenario = SCENARIOS.iter().find(|(name, _)| *name == wanted);
    scenario.expect("a scenario of the table").1();
}

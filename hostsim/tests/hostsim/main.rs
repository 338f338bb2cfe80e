//! Tests of the stand-ins through the functions that C programs call.
//!
//! One test program, so that it can start itself again as the ranks of a communicator and as victims that must crash
//! (`kit::start`).

// Clippy's exemption for tests covers only the test functions, not their helpers.
#![allow(clippy::expect_used, clippy::panic)]
#![allow(unsafe_code)] // C calls.

mod aborts;
mod collectives;
mod communicators;
mod failures;
mod graphs;
mod groups;
mod kit;
mod memory;
mod messages;
mod streams;
mod surface;

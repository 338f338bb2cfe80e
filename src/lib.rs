//! Expert-parallel (MoE) dispatch and combine: the core, independent of any ABI.
//!
//! Each ABI is a separate crate on top (`abi/`): it reads C's arguments, calls `session`, and puts refusals into its
//! own words. Dependencies point down only (`tests/layering.rs`).
//!
//! ```text
//! C program -> abi/*: exported functions, raw structs, numbers for objects, texts
//!   -> session   groups, handles, staged operations
//!   -> rule      plain data -> checked operations (pure)
//!   -> backend   trait; siblings host (shared memory, also the oracle) and cuda
//! ```
//!
//! `model` is the vocabulary that all of them share; `tuning` holds the launch shapes measured on this machine. See
//! `docs/architecture.md`.

// Its only callers are the ABIs beside it: a name that says it all needs no comment.
#![allow(missing_docs)]

#[cfg(test)]
#[path = "allocations_tests.rs"]
mod allocations;
pub mod backend;
pub mod env;
pub mod error;
pub mod fork;
pub mod log;
pub mod model;
mod named;
pub mod nvtx;
pub mod rule;
pub mod session;
pub mod tuning;

//! Expert-parallel (MoE) dispatch and combine: a drop-in for the first release of NVIDIA's
//! `libnccl_ep`.
//!
//! The way of one call, and the rule of the house: arrows go down only (`tests/layering.rs`).
//!
//! ```text
//! C program -> include/nccl_ep.h
//!   -> ffi       the exported functions: guard, read, call, code
//!   -> abi       what C sees, as plain Rust data
//!   -> request   plain data -> checked operations (pure)
//!   -> state     groups, handles, staged operations
//!   -> backend   trait; siblings host (shared memory, also the oracle) and cuda
//! ```
//!
//! `model` is the vocabulary that all of them share; `tuning` has the launch shapes that were measured
//! on this machine. See `docs/architecture.md`.

pub mod abi;
pub mod backend;
pub mod build_info;
pub mod env;
pub mod error;
pub mod ffi;
pub mod log;
pub mod model;
pub mod request;
pub mod state;
pub mod tuning;

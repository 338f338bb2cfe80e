//! Kernel parameters: one `#[repr(C)]` struct per kernel, defined here and nowhere else.
//!
//! `tests/kernel_params.rs` generates a header of `cuda/params/` from each file, so the files use no
//! other module. Addresses are the device's; the host never follows them through these structs.

pub mod common;
pub mod ht;
pub mod ht_nodes;
pub mod ll;

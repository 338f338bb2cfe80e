//! What a C caller sees: the first-release ABI as plain Rust data, and the reading of raw pointers.
//!
//! No behaviour here. `types` is the source of `include/nccl_ep.h`.

pub mod read;
pub mod types;

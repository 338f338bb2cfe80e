//! The ABI of the first release of NVIDIA's `libnccl_ep`, over the core.
//!
//! Here is all that this ABI alone has: its functions and raw structs (`types` and the functions are the source of
//! `include/nccl_ep.h`), the numbers that stand for objects, who frees tensors, and the words of refusals.
//!
//! The exported functions are alike: enter the guard, read the arguments, call the core, return a code.

mod callbacks;
mod group;
mod guard;
mod handle;
mod info;
mod objects;
mod ops;
mod owners;
mod read;
mod refuse;
mod registry;
mod tags;
mod tensor;
mod texts;
/// What the header declares, also what Rust never makes itself.
pub mod types;
mod version;

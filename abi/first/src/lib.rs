//! The ABI of the first release of NVIDIA's `libnccl_ep`, over the core.
//!
//! It has what this ABI alone needs: its functions and raw structs (`types` and the functions are
//! the source of `include/nccl_ep.h`), numbers for objects, ownership of tensor memory, and the
//! words of refusals.
//!
//! All exported functions work alike: enter the guard, read the arguments, call the core, return a
//! code.

mod choices;
mod group;
mod handle;
mod info;
mod memory;
mod objects;
mod ops;
mod owners;
mod pool;
mod read;
mod statistics;
mod tensor;
mod texts;
/// The types of the header, including those that Rust never constructs.
pub mod types;

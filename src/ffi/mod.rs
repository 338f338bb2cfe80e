//! The exported functions, and nothing else.
//!
//! Each is alike: enter the guard, read the arguments, call `state`, return a code. Their comments are
//! the documentation in `include/nccl_ep.h`.

mod callbacks;
mod group;
mod guard;
mod handle;
mod info;
mod ops;
mod tensor;

//! The NCCL subset, with the signatures and result codes of NCCL 2.28.
//!
//! | module | holds |
//! |---|---|
//! | [`api`] | the entry points |
//! | `lifetime`, `window` | those that make, question and end communicators; those of memory and windows |
//! | `boundary`, `config` | what each does around its body; the checks of arguments |
//! | `group` | what `ncclGroupStart` keeps until `ncclGroupEnd` |
//! | `launch` | puts operations into streams |
//! | `collective`, `transfer` | what the streams' workers execute: collectives; sends and receives |
//! | `comm` | communicators: one rank's end, its handle, splitting |
//! | `meeting`, `segment` | how ranks meet in a communicator's shared memory |
//! | `delay` | random delays of operations |
//! | [`unique_id`], [`error`], `datatype` | ids, result codes, element types and their sums |
//!
//! Imports go down this table only; `tests/layering.rs` of the core fails on a circle.

pub mod api;
mod boundary;
mod collective;
mod comm;
mod config;
mod datatype;
mod delay;
pub mod error;
mod group;
mod launch;
mod lifetime;
mod meeting;
mod segment;
mod transfer;
pub mod unique_id;
pub mod window;

//! The CUDA runtime subset, with the names, signatures and error numbers of CUDA 13.
//!
//! | module | holds |
//! |---|---|
//! | [`reset`] | the end of everything on a device |
//! | [`event`], [`capture`] | marks in streams; entry points for captures and graphs |
//! | [`memory`], [`copy`] | allocation entry points; copies and fills |
//! | [`stream`], [`device`] | stream entry points; devices, their streams, device-wide synchronisation |
//! | `recording`, `graph` | captures under way; what they become, and its replays |
//! | `heap`, `arena` | the register of all memory, with poison and guards |
//! | `queue`, [`error`] | a stream's worker; error numbers, the last error, what entry points do around their bodies |
//!
//! Imports go down this table only; `tests/layering.rs` of the core fails on a circle.

mod arena;
pub mod capture;
pub mod copy;
pub mod device;
pub mod error;
pub mod event;
pub(crate) mod graph;
pub(crate) mod heap;
pub mod memory;
pub(crate) mod queue;
pub(crate) mod recording;
pub mod reset;
pub mod stream;

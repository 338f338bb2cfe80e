//! The objects behind the C handles: groups, handles, created tensors.
//!
//! A handle that C holds is a number that is never used again, so a dead or foreign one is
//! recognised instead of followed.
#![forbid(unsafe_code)]

pub mod create;
pub mod group;
pub mod handle;
pub mod registry;
pub mod tensors;

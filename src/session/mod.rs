//! Open groups and handles: the interface on which the ABIs are built.

pub mod about;
mod check;
pub mod choices;
pub mod create;
mod findings;
pub mod group;
pub mod handle;
mod memory;
mod route;

//! Open groups and handles; an ABI gives them numbers or addresses.

pub mod about;
mod check;
pub mod choices;
pub mod create;
mod findings;
pub mod group;
pub mod handle;
mod memory;
mod route;

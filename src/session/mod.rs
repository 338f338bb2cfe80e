//! Groups and handles while they are open; an ABI gives them numbers or addresses.
#![forbid(unsafe_code)]

pub mod about;
pub mod create;
pub mod group;
pub mod handle;
mod route;

//! Groups and handles while they are open: objects without numbers, which an ABI gives them.
#![forbid(unsafe_code)]

pub mod create;
pub mod group;
pub mod handle;
mod route;
mod stream;

//! The ranks of a group towards each other: windows and their mappings, faults that one reports to
//! the others, and teardown.
#![forbid(unsafe_code)]

pub mod fault;
pub mod layout;
mod process;
pub mod selftest;
pub mod teardown;
pub mod window;
pub mod windows;

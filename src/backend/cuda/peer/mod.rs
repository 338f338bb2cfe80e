//! What the ranks of a group hold of each other: windows and their mappings, faults that one tells the others,
//! and how they part.
#![forbid(unsafe_code)]

pub mod fault;
pub mod layout;
mod process;
pub mod selftest;
pub mod teardown;
pub mod window;
pub mod windows;

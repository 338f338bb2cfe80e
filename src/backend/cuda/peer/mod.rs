//! What the ranks of a group hold of each other: windows and their mappings, a self test,
//! and how they part.
#![forbid(unsafe_code)]

pub mod layout;
mod process;
pub mod selftest;
pub mod teardown;
pub mod window;
pub mod windows;

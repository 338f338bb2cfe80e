//! What the ranks of a group have of each other: windows and their mappings, a self-test, and teardown.

mod descriptors;
pub mod layout;
pub mod object_memory;
pub mod selftest;
pub mod teardown;
pub mod window;
pub mod windows;

//! Memory that the ranks of a node map of each other: windows and objects, a self-test, and teardown.

mod descriptors;
pub mod layout;
pub mod object_memory;
pub mod selftest;
pub mod teardown;
pub mod window;
pub mod windows;

//! What the ABIs over the core have in common: the guard around every exported function, numbers for objects, the words
//! of refusals, and the claim of a process.
//!
//! It exports no symbol, and knows no name of an ABI but those that all of them have.

pub mod guard;
pub mod numbers;
pub mod process;
pub mod refuse;
pub mod registry;
pub mod texts;

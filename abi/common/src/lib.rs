//! What the ABIs over the core share: the guard around every exported function, numbers for objects, the words of
//! refusals, and the claim on the process.
//!
//! It exports no symbol, and knows only names that all ABIs have.

pub mod guard;
pub mod numbers;
pub mod process;
pub mod refuse;
pub mod registry;
pub mod texts;

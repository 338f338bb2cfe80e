//! The later ABI of NVIDIA's NCCL EP, `libnccl_ep.so.0`, over the core: named structs with size and magic.
//!
//! It has what only this ABI needs: its functions and raw structs (`types`, `enums` and the functions are the source of
//! the headers in `include/nccl_ep_2`), reading structs of other generations, tensor descriptors, and names in texts.
//!
//! All exported functions work alike: enter the guard, read the arguments, call the core, return a code. What the core
//! does not serve yet is refused (`texts::not_served`).

mod allocator;
mod combine;
mod dispatch;
/// The enums of the header.
pub mod enums;
mod group;
mod handle;
#[cfg(feature = "test-hook")]
mod hook;
mod info;
mod objects;
mod read;
mod received;
mod recipe;
mod routing;
mod settings;
mod tensor;
mod texts;
/// The types of the header, including those that Rust never constructs.
pub mod types;

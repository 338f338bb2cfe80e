//! The vocabulary of the library: element types, tensors, scales, group facts, layouts, operations, ranks, topology.
//!
//! Plain data and its arithmetic. Nothing here accesses memory that it does not own.

pub mod group;
pub mod handle_state;
pub mod hash;
pub mod ids;
pub mod layout;
pub mod node_view;
pub mod objects;
pub mod ops;
pub mod regions;
pub mod room;
pub mod scales;
pub mod tensor;
pub mod topology;

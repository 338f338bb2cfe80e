//! Kernel parameters: one `#[repr(C)]` struct per kernel, defined here and nowhere else.
//!
//! `build.rs` generates a C++ header from each file. Addresses are the device's, which the host never dereferences.
#![allow(missing_docs)] // As in the core.

pub mod common;
pub mod ht;
pub mod ht_kept;
pub mod ht_mapped;
pub mod ht_nodes;
pub mod ll;
pub mod ll_pack;
pub mod ll_view;

#[cfg(test)]
mod tests {
    #[test]
    fn the_c_programs_send_the_word_that_means_not_arrived() {
        let source = include_str!("../../../c_tests/reference/rows.h");
        let defined = format!("#define kRefSentinel {:#x}u", super::ll::LL_SENTINEL);
        assert!(source.contains(&defined), "{defined}");
    }
}

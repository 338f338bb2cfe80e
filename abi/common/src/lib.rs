//! What the ABIs over the core share: the guard around every exported function, numbers for objects, the words of
//! refusals, and the claim on the process.
//!
//! It exports no symbol, and knows only names that all ABIs have.

pub mod guard;
pub mod process;
pub mod refuse;
pub mod registry;
pub mod texts;

use nccl_ep_core::error::Result;
use nccl_ep_core::model::group::Algorithm;

/// Defines the module `raw` with numbers in place of these enums, as a caller may pass any. They have the enums' names:
/// so headers have the enums, since cbindgen does not see what a macro defines.
#[macro_export]
macro_rules! raw {
    ($($name:ident),+) => {
        /// Numbers in place of enums.
        pub mod raw {
            $(
                /// An enumerator, or any other number.
                pub type $name = std::ffi::c_uint;
            )+
        }
    };
}

/// The mode that `config.algorithm` selects in every ABI.
pub fn algorithm(number: u32) -> Result<Algorithm> {
    match number {
        0 => Ok(Algorithm::LowLatency),
        1 => Ok(Algorithm::HighThroughput),
        other => Err(refuse::argument("config.algorithm", "must be a known algorithm")
            .got(other, "0 (low latency) or 1 (high throughput)")),
    }
}

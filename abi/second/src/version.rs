//! The version of the interface, as a number and as the banner that clients look for in the file.

use crate::types::NCCL_EP_VERSION_CODE;

macro_rules! version {
    () => {
        concat!("0.2.0+cuda", env!("NCCL_EP_CUDA_VERSION"))
    };
}

/// A client reads this line out of the file, and compares the version of CUDA; the zeros keep it apart from its
/// neighbours there.
#[used]
static BANNER: &str = concat!("\0NCCL EP version ", version!(), "\0");

/// The version as log lines have it.
pub const TEXT: &str = concat!("NCCL EP version ", version!());

/// MAJOR * 10000 + MINOR * 100 + PATCH: clients ask it what this interface has.
pub const NUMBER: i32 = NCCL_EP_VERSION_CODE;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{NCCL_EP_MAJOR, NCCL_EP_MINOR, NCCL_EP_PATCH};

    #[test]
    fn number_and_text_are_those_of_the_header() {
        let (major, minor, patch) = (NCCL_EP_MAJOR, NCCL_EP_MINOR, NCCL_EP_PATCH);
        assert_eq!(NUMBER, major * 10_000 + minor * 100 + patch);
        assert!(TEXT.starts_with(&format!("NCCL EP version {major}.{minor}.{patch}+")));
    }
}

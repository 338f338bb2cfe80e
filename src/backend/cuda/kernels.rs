//! The kernels by name, and which parameters belong to which.
//!
//! `tests/kernel_params.rs` compares the names with the entries of `cuda/*.cu`.
#![forbid(unsafe_code)]

use crate::backend::cuda::params::PeerSelftestParams;

/// A kernel's entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// `cuda/peer_selftest.cu`.
    PeerSelftest,
}

impl Kernel {
    /// All of them, each at the index of its own number.
    pub const ALL: [Kernel; 1] = [Kernel::PeerSelftest];

    /// The name of its `extern "C" __global__` function.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::PeerSelftest => "peer_selftest",
        }
    }
}

/// What a kernel takes as its only parameter.
pub trait KernelParams: Copy {
    /// The kernel.
    const KERNEL: Kernel;
}

impl KernelParams for PeerSelftestParams {
    const KERNEL: Kernel = Kernel::PeerSelftest;
}

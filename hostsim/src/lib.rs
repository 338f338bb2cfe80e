//! CPU stand-ins for the subset of the CUDA runtime and of NCCL that expert-parallel programs use.
//!
//! A C or C++ program without device code links this library instead of `libcudart` and `libnccl` and then runs on a
//! machine without a GPU. It is **not** an emulator: there are no kernels. In place of kernel launches there is
//! [`cuda::stream::cudaLaunchHostFunc`].
//!
//! The stand-ins are made to expose mistakes, not to hide them:
//!
//! * every stream is a thread of its own, so work is really asynchronous and a missing
//!   synchronisation is seen ([`cuda`]);
//! * device memory starts poisoned, ends at a guard page, and faults once it has been freed;
//! * a communicator is one shared-memory segment with futex barriers, it works over processes and
//!   over threads of one process, and a collective that some rank never joins ends in an error
//!   that says who was missing ([`nccl`]).
//!
//! The library has its own file name and SONAME, so it cannot shadow the real ones, and it refuses to work if an NVIDIA
//! driver is present, unless `NCCLEP_HOSTSIM_WITH_GPU=1` is set.
//!
//! # Safety
//! Pointers to results (`Option<&mut T>`) are NULL or valid for a write. Unless an unsafe function says otherwise, it
//! writes results until the end of an open group, and reads the program's own buffers until the stream has passed the
//! operation.
// Functions with C's names are documented by CUDA and NCCL.
#![allow(missing_docs, clippy::missing_safety_doc, non_camel_case_types)]

pub mod cuda;
mod handles;
pub mod nccl;
mod presence;
mod report;

mod marker {
    #![allow(unsafe_code)]

    use std::ffi::c_int;

    /// Version of the private interface between this library and `libnccl_ep`, which chooses its host backend if the
    /// process has this symbol.
    // SAFETY: the name is this project's own and is defined once in the process.
    #[unsafe(no_mangle)]
    pub extern "C" fn ncclEpHostsimAbi() -> c_int {
        2
    }
}

pub use marker::ncclEpHostsimAbi;

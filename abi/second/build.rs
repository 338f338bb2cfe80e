//! Names the shared library, and passes on the CUDA version with which the core's kernels were
//! built.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl_ep.so.0");
    let cuda = std::env::var("DEP_NCCL_EP_CORE_CUDA_VERSION").unwrap_or_default();
    println!("cargo::rustc-env=NCCL_EP_CUDA_VERSION={cuda}");
}

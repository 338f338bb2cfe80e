//! Gives the shared library its own SONAME, so that it can never be taken for libcudart or libnccl.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libncclep_hostsim.so");
}

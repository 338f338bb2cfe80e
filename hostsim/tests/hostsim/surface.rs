//! Versions, devices, errors, and the answers to what is out of scope.

use std::ffi::{CStr, c_int};
use std::process::Command;
use std::ptr::null_mut;

use ncclep_hostsim::cuda::capture::*;
use ncclep_hostsim::cuda::device::*;
use ncclep_hostsim::cuda::error::{cudaGetErrorString, cudaGetLastError, cudaPeekAtLastError};
use ncclep_hostsim::cuda::memory::cudaMemGetInfo;
use ncclep_hostsim::nccl::api::*;

use crate::kit::*;

/// Numbers of exported functions; if one vanishes, programs fail to link.
const CUDA_NAMES: usize = 48;
const NCCL_NAMES: usize = 36;
const INVALID_DEVICE: i32 = 101;
const NOT_SUPPORTED: i32 = 801;
/// Tells a child process what CUDA calls must return.
const EXPECTED: &str = "HOSTSIM_TEST_EXPECTED";

/// Calls a function that writes one int.
fn ask(question: extern "C" fn(Option<&mut c_int>) -> i32) -> (i32, c_int) {
    let mut answer = -7;
    (question(Some(&mut answer)), answer)
}

#[test]
fn versions_and_marker() {
    assert_eq!(ncclep_hostsim::ncclEpHostsimAbi(), 2);
    assert_eq!(ask(cudaDriverGetVersion), (SUCCESS, 13000));
    assert_eq!(ask(ncclGetVersion), (SUCCESS, 22809));
    assert_eq!(cudaDriverGetVersion(None), INVALID_VALUE);
}

/// What a tool reports about the shared library, which is beside this program.
fn inspect(tool: &str, option: &str) -> String {
    let program = std::env::current_exe().expect("own path");
    let library = program.with_file_name("libncclep_hostsim.so");
    let output = Command::new(tool).arg(option).arg(library).output();
    let output = output.expect("binutils");
    assert!(output.status.success(), "{tool}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_library_cannot_be_taken_for_another() {
    let dynamic = inspect("readelf", "-d");
    assert!(dynamic.contains("soname: [libncclep_hostsim.so]"), "{dynamic}");
    for line in dynamic.lines().filter(|line| line.contains("NEEDED")) {
        assert!(!line.contains("cuda") && !line.contains("nccl"), "{line}");
    }
}

#[test]
fn only_names_for_c_are_exported() {
    let symbols = inspect("nm", "-D");
    let defined = |line: &str| line.split_once(" T ").map(|(_, name)| name.trim().to_owned());
    let exported: Vec<String> = symbols.lines().filter_map(defined).collect();
    let named_for_c = |name: &String| name.starts_with("cuda") || name.starts_with("nccl");
    assert!(exported.iter().all(named_for_c), "{exported:?}");
    assert_eq!(exported.iter().filter(|name| name.starts_with("cuda")).count(), CUDA_NAMES);
    assert_eq!(exported.iter().filter(|name| name.starts_with("nccl")).count(), NCCL_NAMES);
}

/// With an empty library in place of the GPU driver's.
#[test]
fn nothing_works_beside_a_driver_unless_told() {
    let answer = |settings: &[(&str, &str)]| {
        processes(1, settings, || {
            let expected: i32 = std::env::var(EXPECTED).expect("set").parse().expect("a number");
            assert_eq!(ask(cudaGetDeviceCount).0, expected);
            assert_eq!(cudaSetDevice(0), expected);
            let nccl = ask(ncclGetVersion).0;
            assert_eq!(nccl, if expected == SUCCESS { SUCCESS } else { UNHANDLED_CUDA_ERROR });
        })
    };
    if std::env::var(EXPECTED).is_ok() {
        answer(&[]);
    }
    let folder = std::env::temp_dir().join(format!("hostsim-driver-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("a folder");
    let library = folder.join("libcuda.so.1");
    let built = Command::new("cc").args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-o"]).arg(&library).status();
    assert!(built.expect("a C compiler").success());
    let path = ("LD_LIBRARY_PATH", folder.to_str().expect("UTF-8"));
    let refused = answer(&[path, (EXPECTED, "100")]);
    let told = answer(&[path, (EXPECTED, "0"), ("NCCLEP_HOSTSIM_WITH_GPU", "1")]);
    std::fs::remove_dir_all(&folder).expect("the folder");
    assert_eq!(refused.matches("refusing to stand in for CUDA").count(), 1, "{refused}");
    assert!(!told.contains("refusing"), "{told}");
}

#[test]
fn devices_are_per_thread() {
    assert_eq!(ask(cudaGetDeviceCount), (SUCCESS, 16));
    assert_eq!(cudaSetDevice(3), SUCCESS);
    assert_eq!(cudaSetDevice(16), INVALID_DEVICE);
    assert_eq!(cudaSetDevice(-1), INVALID_DEVICE);
    assert_eq!(ask(cudaGetDevice), (SUCCESS, 3));
    let other = std::thread::spawn(|| ask(cudaGetDevice)).join().expect("no panic");
    assert_eq!(other, (SUCCESS, 0));
    assert_eq!(cudaPeekAtLastError(), INVALID_DEVICE);
    assert_eq!(cudaGetLastError(), INVALID_DEVICE);
    assert_eq!(cudaGetLastError(), SUCCESS);
}

#[test]
fn attributes_and_memory() {
    let mut value = 0;
    assert_eq!(cudaDeviceGetAttribute(Some(&mut value), 10, 0), SUCCESS);
    assert_eq!(value, 32, "warp size");
    assert_eq!(cudaDeviceGetAttribute(Some(&mut value), 9999, 0), INVALID_VALUE);
    assert_eq!(cudaDeviceGetAttribute(Some(&mut value), 10, 99), INVALID_DEVICE);
    let (mut free, mut total) = (0, 0);
    assert_eq!(cudaMemGetInfo(Some(&mut free), Some(&mut total)), SUCCESS);
    assert!(0 < free && free <= total, "{free} of {total}");
}

#[test]
fn capture_is_declined_unless_allowed() {
    let mut status = -1;
    let mut graph = 8 as *mut _;
    assert_eq!(cudaStreamIsCapturing(null_mut(), Some(&mut status)), SUCCESS);
    assert_eq!(status, 0);
    assert_eq!(cudaStreamBeginCapture(null_mut(), 0), NOT_SUPPORTED);
    assert_eq!(cudaStreamEndCapture(null_mut(), Some(&mut graph)), NOT_SUPPORTED);
    assert!(graph.is_null());
    assert_eq!(cudaGraphInstantiate(Some(&mut graph), null_mut(), 0), NOT_SUPPORTED);
    assert_eq!(cudaGraphLaunch(null_mut(), null_mut()), NOT_SUPPORTED);
    assert_eq!(cudaGraphDestroy(null_mut()), NOT_SUPPORTED);
    assert_eq!(cudaGraphExecDestroy(null_mut()), NOT_SUPPORTED);
}

#[test]
fn unknown_communicators_are_refused_with_a_text() {
    let mut count = 0;
    assert_eq!(ncclCommCount(null_mut(), Some(&mut count)), 4);
    assert_eq!(ncclCommDestroy(0x1234 as *mut _), 4);
    // SAFETY: the functions return C strings.
    unsafe {
        let text = CStr::from_ptr(ncclGetLastError(null_mut())).to_string_lossy();
        assert!(text.contains("comm is NULL"), "{text}");
        assert!(!CStr::from_ptr(ncclGetErrorString(4)).is_empty());
        assert!(!CStr::from_ptr(cudaGetErrorString(1)).is_empty());
    }
}

//! Tests that need one GPU. They are ignored by default; the step `gpu/rust` of `make gpu-test` runs them.
//!
//! Two ranks share the GPU, each with its own window and thread, so that a test can omit one rank's sends.

use super::driver;
use super::driver::context::Context;
use super::driver::memory::{Buffer, CudaMemory, HostPage};
use super::driver::module::Module;
use super::fault::FaultPage;
use super::group_context::peer_table;
use super::params::common::{FaultReport, KernelOp, SelftestResult};
use super::peer::layout::WindowLayout;
use super::peer::selftest;
use super::peer::window::Window;
use crate::backend::Faults;
use crate::backend::device::{Device, Memory};
use crate::error::{Code, Result};
use crate::model::ids::LocalRank;
use crate::model::node_view::tests::view;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Only one test at a time uses the GPU: an allocation in one would wait for the kernels of another.
static GPU: Mutex<()> = Mutex::new(());

const TIMEOUT: Duration = Duration::from_millis(300);

/// One GPU, and the windows of two ranks on it.
struct Bench {
    context: Arc<Context>,
    memory: Arc<CudaMemory>,
    module: Module,
    layout: WindowLayout,
    windows: [Window; 2],
    /// The ranks' failure marks.
    failed: [Buffer; 2],
    verdicts: [HostPage<SelftestResult>; 2],
    /// One per rank, as the ranks' kernels wait for each other.
    streams: [Stream; 2],
    _alone: MutexGuard<'static, ()>,
}

impl Bench {
    fn open() -> Self {
        let alone = GPU.lock();
        let context = Arc::new(Context::for_device(0).unwrap());
        let memory = Arc::new(CudaMemory { context: Arc::clone(&context) });
        let module = Module::load(&context).unwrap();
        let entered = context.enter().unwrap();
        let streams = [(); 2].map(|()| driver::create_stream().unwrap());
        drop(entered);
        let layout = WindowLayout::new(2, 0);
        let windows = [(); 2].map(|()| Window::new(&memory, layout.bytes).unwrap());
        let failed = [(); 2].map(|()| Buffer::zeroed(&memory, size_of::<u32>()).unwrap());
        let verdicts = [(); 2].map(|()| HostPage::new(&context, 2).unwrap());
        Self { context, memory, module, layout, windows, failed, verdicts, streams, _alone: alone }
    }

    fn address(&self, rank: usize, offset: usize) -> DevPtr {
        DevPtr(self.windows[rank].base().0 + offset)
    }

    fn faults(&self, rank: usize) -> FaultPage {
        FaultPage::new(&self.context, Arc::new(view("aa", rank)), TIMEOUT, |_| None, 0).unwrap()
    }

    /// Rank `rank`'s part of the self-test, on its stream.
    fn run(&self, rank: usize, faults: &FaultPage) -> Result<()> {
        let peers = peer_table([0, 1].map(|peer| self.address(peer, 0).0).into_iter(), LocalRank::new(rank));
        let peer_failed = self.address(rank, self.layout.peer_failed);
        let wait = faults.wait_params(KernelOp::PeerSelftest, self.failed[rank].data(), peer_failed);
        let (view, stream) = (view("aa", rank), self.streams[rank]);
        selftest::run(&self.verdicts[rank], &self.module, &peers, &view, &self.layout, wait, stream)
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_missing_rank_ends_in_a_report_and_the_context_stays_usable() {
    let bench = Bench::open();
    let faults = bench.faults(0);
    let start = Instant::now();
    let error = bench.run(0, &faults).unwrap_err();
    assert!(start.elapsed() >= TIMEOUT && start.elapsed() < TIMEOUT * 10);
    assert_eq!(error.code(), Code::RemoteError);

    let report = faults.first().unwrap();
    assert_eq!(report.code(), Code::RemoteError);
    let expected = "peer self test: deadline passed: rank 0 waited 300 ms for the data of \
                    operation 1 of rank 1, whose last one is 0";
    assert_eq!(report.text(), expected);

    let mut mark = [0; 4];
    bench.memory.download(&mut mark, bench.failed[0].data()).unwrap();
    assert_eq!(u32::from_le_bytes(mark), 1, "later waits of the group give up at once");
    let start = Instant::now();
    bench.run(0, &faults).unwrap_err();
    assert!(start.elapsed() < TIMEOUT);
}

#[test]
#[ignore = "needs a GPU"]
fn data_that_the_flag_announced_too_early_is_found() {
    let bench = Bench::open();
    let flag_of_rank_1 = bench.address(0, bench.layout.selftest_flags + size_of::<u32>());
    bench.memory.upload(flag_of_rank_1, &1_u32.to_le_bytes()).unwrap();
    let error = bench.run(0, &bench.faults(0)).unwrap_err();
    assert_eq!(error.code(), Code::InternalError);
    assert!(error.text().contains("rank 0 received wrong data from rank 1"), "{error}");
}

#[test]
#[ignore = "needs a GPU"]
fn the_callers_context_is_left_as_it_was() {
    let bench = Bench::open();
    let before = driver::context_handle::current_context().unwrap();
    let data = bench.memory.alloc(64).unwrap();
    bench.memory.upload(data, &[7; 64]).unwrap();
    let mut back = [0; 64];
    bench.memory.download(&mut back, data).unwrap();
    bench.memory.free(data).unwrap();
    assert_eq!(back, [7; 64]);
    assert!(bench.memory.is_idle(Stream(0)).unwrap());
    assert_eq!(driver::context_handle::current_context().unwrap(), before);
}

#[test]
#[ignore = "needs a GPU"]
fn only_mapped_host_memory_has_a_device_alias() {
    let bench = Bench::open();
    let page = HostPage::<FaultReport>::new(&bench.context, 1);
    let pinned = DevPtr(page.as_ref().unwrap().device() as usize);
    assert_eq!(bench.memory.device_alias(pinned), Ok(pinned));
    let plain = DevPtr(Box::new(0_u64).as_ref() as *const u64 as usize);
    assert_eq!(bench.memory.device_alias(plain).unwrap_err().code(), Code::InvalidArgument);
}

#[test]
fn without_a_driver_the_error_says_so() {
    // The only test of this file that runs on machines without a GPU.
    if let Err(error) = super::CudaPlatform::new(0) {
        assert_eq!(error.code(), Code::UnhandledCudaError);
        assert!(error.text().contains("libcuda.so.1") || error.text().contains("cuInit"), "{error}");
    }
}

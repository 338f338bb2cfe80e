//! Opening a group on this backend, and running its operations on the caller's streams.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::host::exchange::Exchange;
use crate::backend::host::ht::HostHt;
use crate::backend::host::ll::HostLl;
use crate::backend::host::runtime::{HostRuntime, Pending};
use crate::backend::host::terms::Call;
use crate::backend::host::turns::Turns;
use crate::backend::host::window::{Address, Window};
use crate::backend::select::Platform;
use crate::backend::{DeviceMemory, GroupBackend, HtBackend, HtRouting, LlBackend};
use crate::error::{Code, Context, Error, Result, Words};
use crate::model::group::GroupFacts;
use crate::model::ops::{Routing, Stream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A process with the CPU stand-ins.
pub struct HostPlatform {
    runtime: HostRuntime,
}

impl HostPlatform {
    /// The platform, if the stand-ins are loaded.
    pub fn detect() -> Result<Option<Self>> {
        Ok(HostRuntime::detect()?.map(|runtime| Self { runtime }))
    }
}

impl Platform for HostPlatform {
    fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::new(self.runtime)
    }

    fn open(
        &self,
        facts: GroupFacts,
        bootstrap: Bootstrap,
        timeout: Duration,
        stream: Stream,
    ) -> Result<Box<dyn GroupBackend>> {
        let windows = open_windows(&bootstrap, stream)?;
        let exchange = Exchange::new(facts.rank, windows, timeout);
        let pending = Arc::default();
        self.runtime.watch(&pending);
        let shared = Arc::new(Shared {
            facts,
            exchange,
            words: bootstrap.words(),
            turns: Turns::default(),
            pending,
            runtime: self.runtime,
        });
        Ok(Box::new(HostGroup {
            shared,
            bootstrap,
            timeout,
        }))
    }
}

/// Makes this rank's window and opens the others'. No rank goes on before all have opened all, so
/// that every window is still there when it is opened.
fn open_windows(bootstrap: &Bootstrap, stream: Stream) -> Result<Vec<Window>> {
    const BYTES: usize = 8;
    let own = Window::create(bootstrap.ranks());
    let mine = own.as_ref().map_err(Error::clone).map(|own| {
        let Address {
            process,
            descriptor,
        } = own.address();
        [process.to_le_bytes(), descriptor.to_le_bytes()].concat()
    });
    let addresses = bootstrap.agree(mine, BYTES, stream)?;
    let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
    let windows: Result<Vec<Window>> = addresses
        .iter()
        .enumerate()
        .map(|(owner, record)| {
            open_window(record, ranks).map_err(|error| {
                error.within(format_args!(
                    "rank {rank} of {ranks} waited for the window of rank {owner}"
                ))
            })
        })
        .collect();
    let verdict = windows.as_ref().map(|_| Vec::new()).map_err(Error::clone);
    bootstrap.agree(verdict, 0, stream)?;
    windows
}

fn open_window(record: &[u8], ranks: usize) -> Result<Window> {
    let [process, descriptor] = record.as_chunks::<4>().0 else {
        return Err(Error::internal("a window's address of the wrong length"));
    };
    let address = Address {
        process: u32::from_le_bytes(*process),
        descriptor: i32::from_le_bytes(*descriptor),
    };
    Window::open(address, ranks)
}

/// What all handles of a group use.
pub struct Shared {
    pub facts: GroupFacts,
    pub exchange: Exchange,
    /// What tells other ranks of a refusal.
    pub words: Words,
    turns: Turns,
    /// What was enqueued and has not run.
    pending: Arc<Pending>,
    runtime: HostRuntime,
}

impl Shared {
    /// Enqueues an operation on `stream`, in its turn and after what `follow` waits for: `work` gets its
    /// epoch, which is returned, too.
    pub fn enqueue_operation(
        self: &Arc<Self>,
        call: Call,
        stream: Stream,
        follow: impl FnOnce() + Send + 'static,
        work: impl FnOnce(u64) -> Result<()> + Send + 'static,
    ) -> Result<u64> {
        self.exchange.begin(|epoch| {
            let shared = Arc::clone(self);
            let guarded = move || {
                shared.turns.follow(Exchange::previous(epoch));
                follow();
                shared.run(call, move || work(epoch));
                shared.turns.end(epoch);
            };
            self.launch(stream, guarded)
        })
    }

    /// Enqueues `work`, a part of the operation `call`, on `stream`; `end` tells that it is over, however
    /// it went.
    pub fn enqueue(
        self: &Arc<Self>,
        call: Call,
        stream: Stream,
        work: impl FnOnce() -> Result<()> + Send + 'static,
        end: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        let shared = Arc::clone(self);
        let guarded = move || {
            shared.run(call, work);
            end();
        };
        self.launch(stream, guarded)
    }

    fn launch(&self, stream: Stream, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let pending = Arc::clone(&self.pending);
        let counted = move || {
            work();
            pending.end();
        };
        self.pending
            .enqueue(|| self.runtime.launch(stream, Box::new(counted)))
    }

    /// Waits until everything enqueued has run. The deadline is for what is behind an exchange that is stuck; all
    /// else ends by its own.
    fn wait_for_pending(&self, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        while !self.pending.is_empty() {
            if start.elapsed() > timeout && self.runtime.is_stranded() {
                let text = "its operations are behind an exchange that a lost rank never joined";
                return Err(Error::new(Code::RemoteError, text));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// Runs `work`. Its failure, or a panic in it, becomes the group's fault; after a fault nothing runs
    /// any more, as the other ranks have stopped too.
    fn run(&self, call: Call, work: impl FnOnce() -> Result<()>) {
        if self.exchange.fault().is_some() {
            return;
        }
        let outcome = catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|_| Err(Error::internal("a panic in the host backend")));
        if let Err(error) = outcome {
            let context = Context::Running(call.operation());
            self.exchange.fail(error.during(context));
        }
    }
}

/// An open group.
struct HostGroup {
    shared: Arc<Shared>,
    bootstrap: Bootstrap,
    timeout: Duration,
}

impl GroupBackend for HostGroup {
    fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(self.bootstrap.memory())
    }

    fn open_ll(&self, routing: Routing) -> Result<Box<dyn LlBackend>> {
        Ok(Box::new(HostLl::new(Arc::clone(&self.shared), routing)))
    }

    fn open_ht(&self, routing: Result<HtRouting>, stream: Stream) -> Result<Box<dyn HtBackend>> {
        let shared = Arc::clone(&self.shared);
        let handle = HostHt::open(shared, routing, stream, self.timeout)?;
        Ok(Box::new(handle))
    }

    fn fault(&self) -> Option<Error> {
        self.shared
            .exchange
            .fault()
            .or_else(|| self.bootstrap.lost())
    }

    /// Windows stay mapped until the last operation has let go of them, here and on the peers, so there is
    /// nothing to agree on.
    fn close(&self, _stream: Stream) -> Result<()> {
        self.shared.wait_for_pending(self.timeout)
    }
}

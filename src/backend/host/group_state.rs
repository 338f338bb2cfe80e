//! The state that all handles of a group share, and how operations are enqueued on the caller's streams.

use crate::backend::Faults;
use crate::backend::device::{Device, Memory, check_patience};
use crate::backend::host::mailboxes::Mailboxes;
use crate::backend::host::order::{Order, Pending, Received};
use crate::backend::host::runtime::HostRuntime;
use crate::backend::objects::Recognised;
use crate::backend::quiescence::Works;
use crate::error::refusal::Operation;
use crate::error::{Context, Error, Formatter, Result};
use crate::model::group::GroupFacts;
use crate::model::ops::{Rows, Stream, ViewBank};
use crate::model::tensor::DevPtr;
use crate::model::topology::Topology;
use once_cell::sync::OnceCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The state that all handles of a group share.
pub struct GroupState {
    pub facts: GroupFacts,
    pub topology: Topology,
    pub mailboxes: Mailboxes,
    pub views: Views,
    /// Phrases refusals for the other ranks.
    pub formatter: Formatter,
    /// Receive phases of LL operations whose blocks are in callers' memory.
    pub received_in_given: Arc<Received>,
    /// Receive phases of LL dispatches whose rows are views, as any handle's next one may be in the same bank.
    pub received_in_views: Arc<Received>,
    /// The memory of objects.
    pub recognised: Arc<Recognised>,
    order: Order,
    /// Enqueued work that has not run.
    pending: Arc<Pending>,
    runtime: HostRuntime,
}

/// Bytes of a view of the longest rows.
fn view_bytes(facts: &GroupFacts) -> usize {
    facts.ranks * facts.max_tokens.unwrap_or(0) * facts.row_bytes
}

impl GroupState {
    pub fn new(
        facts: GroupFacts,
        topology: Topology,
        mailboxes: Mailboxes,
        formatter: Formatter,
        runtime: HostRuntime,
    ) -> Self {
        let pending = Arc::<Pending>::default();
        runtime.watch_works(Arc::downgrade(&pending) as Weak<dyn Works>);
        Self {
            facts,
            topology,
            mailboxes,
            views: Views::new(runtime, view_bytes(&facts)),
            formatter,
            received_in_given: Arc::default(),
            received_in_views: Arc::default(),
            recognised: Arc::default(),
            order: Order::default(),
            pending,
            runtime,
        }
    }

    /// Looks up the object that `rows` lie in, as backends do that access them in place.
    pub fn recognise(&self, rows: Rows, row_bytes: usize) {
        if let Some(bytes) = rows.rows.checked_mul(row_bytes).filter(|it| *it > 0) {
            self.recognised.locate(rows.data.0 as u64, bytes as u64);
        }
    }

    /// Enqueues an operation on `stream`. It runs in the group's order and after `follow` has returned; `work` gets its
    /// epoch, which is also the result.
    pub fn enqueue_operation(
        self: &Arc<Self>,
        call: Operation,
        stream: Stream,
        follow: impl FnOnce() + Send + 'static,
        work: impl FnOnce(u64) -> Result<()> + Send + 'static,
    ) -> Result<u64> {
        self.mailboxes.begin(|epoch| {
            let shared = Arc::clone(self);
            let guarded = move || {
                shared.order.follow(Mailboxes::previous(epoch));
                follow();
                shared.run(call, move || work(epoch));
                shared.order.end(epoch);
            };
            self.launch(stream, guarded)
        })
    }

    /// Enqueues `work`, a part of the operation `call`, on `stream`; `end` runs after it, even if it fails.
    pub fn enqueue(
        self: &Arc<Self>,
        call: Operation,
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
        self.pending.enqueue(|| self.runtime.launch(stream, Box::new(counted)))
    }

    /// Refuses further work, and waits until all that is enqueued has run, at most for `limit`.
    pub fn close(&self, limit: Duration) -> Result<()> {
        self.pending.close();
        self.wait_for_pending(limit)
    }

    /// Waits until all enqueued work has run, at most for `limit`.
    pub fn wait_for_pending(&self, limit: Duration) -> Result<()> {
        let start = Instant::now();
        while !self.pending.is_empty() {
            check_patience(start.elapsed(), limit, || self.runtime.is_hung())?;
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    /// Runs `work`; its failure or panic becomes the group's fault. After a fault nothing runs any more, as the other
    /// ranks have stopped, too.
    fn run(&self, call: Operation, work: impl FnOnce() -> Result<()>) {
        if self.mailboxes.fault().is_some() {
            return;
        }
        let outcome = catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|_| Err(Error::internal("a panic in the host backend")));
        if let Err(error) = outcome {
            self.mailboxes.fail(error.during(Context::Running(call)));
        }
    }
}

impl Faults for GroupState {
    fn first(&self) -> Option<Error> {
        self.mailboxes.fault()
    }
}

/// Views, in memory of the stand-ins' device that is allocated with the first view and then stays in place.
pub struct Views {
    runtime: HostRuntime,
    bank_bytes: usize,
    banks: OnceCell<DevPtr>,
}

impl Views {
    /// No memory yet; a bank will have `bank_bytes`.
    pub fn new(runtime: HostRuntime, bank_bytes: usize) -> Self {
        Self { runtime, bank_bytes, banks: OnceCell::new() }
    }

    fn bytes(&self) -> usize {
        ViewBank::COUNT * self.bank_bytes
    }

    /// The address of `bank`.
    pub fn at(&self, bank: ViewBank) -> Result<DevPtr> {
        let make = || self.runtime.alloc_own(self.bytes());
        Ok(DevPtr(self.banks.get_or_try_init(make)?.0 + bank.index() * self.bank_bytes))
    }
}

impl Drop for Views {
    fn drop(&mut self) {
        if let Some(&banks) = self.banks.get() {
            self.runtime.free_own(banks, self.bytes());
        }
    }
}

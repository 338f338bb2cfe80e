//! A handle: its present routing, that routing's state in the backend, and a pending staged operation.

use crate::backend::{HtBackend, HtGroupBackend, LlBackend, LlGroupBackend};
use crate::error::refusal::{InSequence, Role, Subject};
use crate::error::{Error, Result};
use crate::model::group::{Algorithm, ByMode};
use crate::model::handle_state::HandleLife;
use crate::model::layout::Layout;
use crate::model::ops::{HandleForm, LlCombine, LlDispatch, LlOp, StagedSlot, Stream, ViewBank};
use crate::model::tensor::{DevPtr, Tensor};
use crate::rule::handle::HandleTensors;
use crate::rule::{self, CombineTensors, DispatchTensors, ht, ll};
use crate::session::choices::{About, Chosen};
use crate::session::group::{Group, Statistic, View};
use crate::session::route::{self, HandleFacts, Routed, SizedBlock};
use crate::tuning::{Operation, RowLayout};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A handle: a routing of tokens to experts, which updates replace, and its state.
pub struct Handle {
    mode: ByMode<Ll, Ht>,
    /// `None` if the block is in the library's memory.
    caller_block: Option<SizedBlock>,
    form: HandleForm,
    life: HandleLife,
    // Last, to be dropped after the backend's state in `mode`.
    group: Arc<Group>,
}

// For each mode: the backend's group, which makes routings, and the handle's state.
type Ll = (Arc<dyn LlGroupBackend>, Mutex<LlHandle>);
type Ht = (Arc<dyn HtGroupBackend>, RwLock<Option<Routed<dyn HtBackend>>>);

/// An LL handle and the state of its routing.
#[derive(Default)]
struct LlHandle {
    routed: Option<Routed<dyn LlBackend>>,
    /// Layout of the last dispatch's rows, which the next combine expects.
    dispatched: Option<Layout>,
    /// The bank of that dispatch's view, if it had one.
    view: Option<ViewBank>,
    staged: Option<Sent>,
}

/// A staged operation that waits for its receive phase.
struct Sent {
    op: LlOp,
    slot: StagedSlot,
    /// The view into which rows go.
    view: Option<View>,
}

/// The routing; an error before the handle's first update.
fn routed<B: ?Sized>(routed: &Option<Routed<B>>) -> Result<&Routed<B>> {
    let missing = || Error::usage(Subject::Handle, InSequence::RouteFirst);
    routed.as_ref().ok_or_else(missing)
}

impl Handle {
    /// A handle without a routing, on which nothing can run before the first [`Handle::update`].
    pub fn new(group: Arc<Group>, form: HandleForm) -> Self {
        let mode = match &group.backend().mode {
            ByMode::Ll(group) => ByMode::Ll((Arc::clone(group), Mutex::default())),
            ByMode::Ht(group) => ByMode::Ht((Arc::clone(group), RwLock::default())),
        };
        Self { mode, caller_block: None, form, life: HandleLife::default(), group }
    }

    /// As [`Self::new`], with the block in a caller's `memory` of `bytes`, at least [`Group::handle_bytes`]. Every
    /// routing must have `top_k` ids per token. The memory is not accessed before an update (in LL, a dispatch) runs.
    ///
    /// If the memory has a block that an equal handle has stored, or a copy of one, HT needs no update, and LL no
    /// dispatch, but an update with the ids. The device checks the block, and the group fails if it is invalid. Over
    /// several nodes the host checks it, so calls wait for their stream, and LL does not use the memory. In HT, either
    /// all ranks' blocks are in callers' memory or none, and they must be of the same update. An abandoned staged
    /// operation uses the memory until the group's next staged operation in its slot, or the group's end.
    pub fn in_memory(
        group: Arc<Group>,
        memory: DevPtr,
        bytes: usize,
        (top_k, form): (usize, HandleForm),
    ) -> Result<Self> {
        let block = rule::handle::memory(memory, bytes, group.handle_bytes(top_k, form)?)?;
        if group.nodes() > 1 && matches!(group.backend().mode, ByMode::Ll(_)) {
            return Ok(Self::new(group, form));
        }
        Ok(Self { caller_block: Some(SizedBlock { block, top_k }), ..Self::new(group, form) })
    }

    /// Replaces the routing by that of `tensors`, which is an error if they could not be read. Collective in HT. After
    /// a refusal this rank still has its old routing. But in HT other ranks may have dropped theirs, as on one node of
    /// GPUs they learn of the refusal later: an operation on the old routing then waits for them until the deadline.
    pub fn update(&self, tensors: Result<HandleTensors>, stream: Stream) -> Result<()> {
        self.group.check_usable()?;
        let _entered = self.group.enter()?;
        let own = HandleFacts { caller_block: self.caller_block.as_ref(), form: self.form, life: &self.life };
        match &self.mode {
            ByMode::Ll((backend, handle)) => {
                let mut handle = handle.lock();
                if handle.staged.is_some() {
                    return Err(Error::usage(Subject::Handle, InSequence::CompleteFirst));
                }
                handle.routed = Some(route::ll(&self.group, backend, tensors, own, stream)?);
                handle.dispatched = None;
                handle.view = None;
                Ok(())
            }
            ByMode::Ht((backend, handle)) => {
                let routed = route::ht(&self.group, backend, tensors, own, stream)?;
                let before = handle.write().replace(routed);
                drop(before);
                Ok(())
            }
        }
    }

    /// Closes the handle, and abandons its staged operation.
    pub fn close(&self) {
        if let ByMode::Ll((_, handle)) = &self.mode {
            let mut handle = handle.lock();
            let sent = handle.staged.take();
            if let (Some(sent), Some(routed)) = (sent, &handle.routed) {
                routed.backend.abandon(&sent.op, sent.slot);
                self.group.end_staged(sent.slot);
            }
            // So that other threads, too, cannot start operations any more.
            handle.routed = None;
        }
    }

    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Enqueues a dispatch. In LL, `staged` leaves the receive phase to [`Handle::complete`]; HT ignores it. Returns
    /// the address of the view that rows go into, if the caller gave no output.
    pub fn dispatch(&self, tensors: &DispatchTensors<'_>, staged: bool, stream: Stream) -> Result<Option<DevPtr>> {
        self.group.check_usable()?;
        let facts = self.group.facts();
        let operations = [Operation::LlDispatch, Operation::HtDispatch];
        let rows = tensors.out_tokens.or(tensors.tokens);
        let chosen = self.chosen(operations, [rows, tensors.out_tokens, tensors.tokens], |_| {
            RowLayout::of(tensors.out_ids.is_some(), tensors.out_tokens.is_some_and(|out| out.data.is_null()))
        });
        match &self.mode {
            ByMode::Ll((_, handle)) => {
                let mut handle = handle.lock();
                let op = LlDispatch {
                    launch: chosen.launch,
                    waits: self.group.address_of(Statistic::Waits),
                    totals: self.group.address_of(Statistic::Rows),
                    ..ll::dispatch(facts, &routed(&handle.routed)?.routing, tensors)?
                };
                let start = |handle: &mut LlHandle, op| {
                    self.start(handle, &LlOp::Dispatch(op), staged, stream)?;
                    handle.dispatched = Some(op.layout);
                    handle.view = op.view;
                    Ok(())
                };
                let out = if op.out.is_null() {
                    let (view, out) = self.group.fill_view(stream, |bank| {
                        let view = || routed(&handle.routed)?.backend.view(&op, staged, bank);
                        let out = self.group.view_at(view, stream)?;
                        start(&mut handle, LlDispatch { out, view: Some(bank), ..op })?;
                        Ok(out)
                    })?;
                    if let Some(sent) = &mut handle.staged {
                        sent.view = Some(view);
                    }
                    Some(out)
                } else {
                    start(&mut handle, op).map(|()| None)?
                };
                Ok(out)
            }
            ByMode::Ht(ht) => self.with_ht(ht, (Role::TokensIn, tensors.tokens), |routed| {
                let mut op = ht::dispatch(facts, &routed.routing, tensors)?;
                (op.launch, op.path) = (chosen.launch, chosen.path);
                ht::dispatch_holds(&routed.routing, &op, routed.rows_to_hold(facts))?;
                if let Some(checks) = self.group.checks() {
                    checks.ht_dispatch(&routed.routing, &op, stream);
                }
                routed.backend.dispatch(&op, stream)?;
                if let Some(totals) = self.group.address_of(Statistic::Rows) {
                    routed.backend.add_counts(totals, stream)?;
                }
                self.group.enqueued(stream);
                Ok(None)
            }),
        }
    }

    /// Enqueues a combine. In LL, `staged` leaves the receive phase to [`Handle::complete`]; HT ignores it.
    pub fn combine(&self, tensors: &CombineTensors<'_>, staged: bool, stream: Stream) -> Result<()> {
        self.group.check_usable()?;
        let facts = self.group.facts();
        let operations = [Operation::LlCombine, Operation::HtCombine];
        let chosen = self.chosen(operations, [tensors.tokens, tensors.tokens, tensors.out_tokens], |handle| {
            RowLayout::of(handle.dispatched.is_some_and(Layout::is_rank_major), handle.view.is_some())
        });
        match &self.mode {
            ByMode::Ll((_, handle)) => {
                let mut handle = handle.lock();
                let routing = &routed(&handle.routed)?.routing;
                let layout = match handle.dispatched {
                    Some(layout) => layout,
                    None if self.caller_block.is_none() => {
                        return Err(Error::usage(Subject::Handle, InSequence::DispatchFirst));
                    }
                    // A guess, which the device compares with the block's header.
                    None => match (tensors.weights, tensors.token_weights) {
                        (None, None) => facts.rank_major(),
                        _ => facts.layout(),
                    },
                };
                let op = ll::combine(facts, routing, tensors, layout)?;
                let op = LlCombine {
                    view: handle.view,
                    launch: chosen.launch,
                    sums: chosen.sums(routing.top_k, op.sums),
                    waits: self.group.address_of(Statistic::CombineWaits),
                    ..op
                };
                self.start(&mut handle, &LlOp::Combine(op), staged, stream)
            }
            ByMode::Ht(ht) => self.with_ht(ht, (Role::TokensOut, tensors.out_tokens), |routed| {
                let mut op = ht::combine(facts, &routed.routing, tensors)?;
                (op.launch, op.path) = (chosen.launch, chosen.path);
                op.waits = self.group.address_of(Statistic::CombineWaits);
                ht::combine_holds(&op, routed.rows_to_hold(facts))?;
                routed.backend.combine(&op, stream)?;
                self.group.enqueued(stream);
                Ok(())
            }),
        }
    }

    /// The choice for an operation, `of_ll` or `of_ht`, on rows like `rows`; peers may map `mapped`. The handle's lock
    /// is not held meanwhile, so the routing may change before the operation is checked. The number of tokens of a
    /// routing in a caller's memory is that of this rank's rows `own`.
    #[inline]
    fn chosen(
        &self,
        [of_ll, of_ht]: [Operation; 2],
        [rows, mapped, own]: [Option<&Tensor>; 3],
        layout: impl FnOnce(&LlHandle) -> RowLayout,
    ) -> Chosen {
        let about = |tokens, top_k, layout| About {
            layout,
            tokens,
            top_k,
            row_bytes: rows.and_then(Tensor::row_bytes).unwrap_or(0),
            mapped: mapped.is_some_and(|it| self.group.is_mapped(it.data)),
        };
        let choices = &self.group.choices;
        match &self.mode {
            ByMode::Ll((_, handle)) => choices.of(of_ll, || {
                let handle = handle.lock();
                let layout = Some(layout(&handle));
                handle.routed.as_ref().map(|it| about(it.routing.tokens, it.routing.top_k, layout))
            }),
            ByMode::Ht((_, handle)) => choices.of(of_ht, || match &self.caller_block {
                Some(memory) => own.and_then(|it| it.sizes().first()).map(|&it| about(it as usize, memory.top_k, None)),
                None => handle.read().as_ref().map(|it| about(it.routing.tokens, it.routing.top_k, None)),
            }),
        }
    }

    /// Enqueues an HT operation on as many tokens of this rank as `rows` has. Of a routing in a caller's memory only
    /// this number is known, as the caller may have replaced the block.
    #[inline]
    fn with_ht<T>(
        &self,
        (backend, handle): &Ht,
        rows: (Role, Option<&Tensor>),
        run: impl FnOnce(&Routed<dyn HtBackend>) -> Result<T>,
    ) -> Result<T> {
        let Some(caller_block) = &self.caller_block else { return run(routed(&handle.read())?) };
        let of = (caller_block.top_k, self.form);
        let routing = rule::handle::routed_before(self.group.facts(), rows, of)?;
        let cached = handle.read();
        if let Some(routed) = &*cached
            && routed.routing.tokens == routing.tokens
        {
            return run(routed);
        }
        drop(cached);
        let routed = route::ht_before(backend, routing, caller_block)?;
        let done = run(&routed)?;
        let before = handle.write().replace(routed);
        drop(before);
        Ok(done)
    }

    fn start(&self, handle: &mut LlHandle, op: &LlOp, staged: bool, stream: Stream) -> Result<()> {
        if handle.staged.is_some() {
            return Err(Error::usage(Subject::Handle, InSequence::CompleteFirst));
        }
        let Routed { routing, backend, .. } = routed(&handle.routed)?;
        if let Some(checks) = self.group.checks() {
            checks.ll(routing, op, staged, stream);
        }
        if staged {
            let send = |slot| backend.send(op, slot, stream);
            handle.staged = Some(Sent { op: *op, slot: self.group.send_staged(send)?, view: None });
        } else {
            backend.run(op, stream)?;
        }
        self.group.enqueued(stream);
        Ok(())
    }

    /// The staged operation to receive; without its rows if a later dispatch has taken the view's bank.
    fn received(&self, sent: &Sent) -> LlOp {
        match (sent.op, sent.view) {
            (LlOp::Dispatch(op), Some(view)) if self.group.has_view_ended(view) => {
                LlOp::Dispatch(LlDispatch { out: DevPtr::default(), ..op })
            }
            (op, _) => op,
        }
    }

    /// Enqueues the receive phase of the staged operation; succeeds if there is none.
    pub fn complete(&self, stream: Stream) -> Result<()> {
        self.group.check_usable()?;
        let ByMode::Ll((_, handle)) = &self.mode else { return Ok(()) };
        let mut handle = handle.lock();
        let Some(sent) = &handle.staged else { return Ok(()) };
        // If this fails, the operation stays pending, and the caller may try again.
        let Routed { routing, backend, .. } = routed(&handle.routed)?;
        if let Some(checks) = self.group.checks() {
            checks.ll_receive(routing, &sent.op, stream);
        }
        backend.receive(&self.received(sent), sent.slot, stream)?;
        self.group.end_staged(sent.slot);
        handle.staged = None;
        self.group.enqueued(stream);
        Ok(())
    }

    /// The most rows that an HT dispatch can deliver, by the bounds of the group and of the routing's slots. In a group
    /// without a bound the exact number, or `None` if it is not known `within` that time.
    pub fn num_recv_tokens(&self, within: Duration) -> Result<Option<usize>> {
        match (&self.mode, self.group.facts().recv_rows()) {
            (ByMode::Ht(_), Some(rows)) if self.form.zones.is_none() => Ok(Some(rows)),
            (ByMode::Ht((_, handle)), Some(_)) => Ok(routed(&handle.read())?.most_rows(self.group.facts())),
            _ => self.expected_rows(within),
        }
    }

    /// As [`Handle::received_rows`], after which operations on fewer rows are refused. Not used in groups with a bound,
    /// where a rank that gets more rows fails while the operation runs, so that other ranks learn of it.
    fn expected_rows(&self, within: Duration) -> Result<Option<usize>> {
        let rows = self.received_rows(within)?;
        if let (ByMode::Ht((_, handle)), None, Some(rows)) = (&self.mode, &self.caller_block, rows) {
            routed(&handle.read())?.reported.store(rows, Ordering::Relaxed);
        }
        Ok(rows)
    }

    /// The rows of the routing that is in a caller's memory once `stream` gets there; `None` if it is not a routing of
    /// this handle's tokens, or if nothing has run on the handle yet.
    pub fn rows_in_memory(&self, stream: Stream) -> Result<Option<usize>> {
        match (&self.caller_block, &self.mode) {
            (Some(_), ByMode::Ht((_, handle))) => match &*handle.read() {
                Some(routed) => routed.backend.num_recv_tokens_in_block(stream),
                None => Ok(None),
            },
            _ => self.expected_rows(Duration::MAX),
        }
    }

    /// The rows that an HT dispatch delivers to this rank; `None` if that is not known `within` this time.
    pub fn received_rows(&self, within: Duration) -> Result<Option<usize>> {
        let ByMode::Ht((_, handle)) = &self.mode else {
            let (got, expected) = (Algorithm::LowLatency, Algorithm::HighThroughput);
            let refused = Error::usage(Subject::Handle, InSequence::HighThroughputOnly);
            return Err(refused.got(got.name(), expected.name()));
        };
        let handle = handle.read();
        routed(&handle)?.backend.num_recv_tokens(within)
    }
}

//! A handle: a replaceable routing, its backend side, and its pending staged operation.

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
use crate::session::route::{self, Given, Own, Routed};
use crate::tuning::{Lie, Operation};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A routing of tokens to experts, and its state.
pub struct Handle {
    mode: ByMode<Ll, Ht>,
    /// `None`: the block is in the library's memory.
    given: Option<Given>,
    form: HandleForm,
    life: HandleLife,
    // Dropped last, after the group's backend in `mode`.
    group: Arc<Group>,
}

/// The side of the group that makes routings, and a handle's state.
type Ll = (Arc<dyn LlGroupBackend>, Mutex<LlHandle>);
type Ht = (Arc<dyn HtGroupBackend>, RwLock<Option<Routed<dyn HtBackend>>>);

/// An LL handle and the state of its routing.
#[derive(Default)]
struct LlHandle {
    routed: Option<Routed<dyn LlBackend>>,
    /// Layout of the last dispatch's rows, which the next combine takes.
    dispatched: Option<Layout>,
    /// The bank of that dispatch's view, if it had one.
    view: Option<ViewBank>,
    staged: Option<Sent>,
}

/// A staged operation that waits for its receive phase.
struct Sent {
    op: LlOp,
    slot: StagedSlot,
    /// The view that its rows go into.
    view: Option<View>,
}

/// The routing; a handle has none before its first update.
fn routed<B: ?Sized>(routed: &Option<Routed<B>>) -> Result<&Routed<B>> {
    let missing = || Error::usage(Subject::Handle, InSequence::RouteFirst);
    routed.as_ref().ok_or_else(missing)
}

impl Handle {
    /// A handle without a routing: nothing can run on it before its first [`Handle::update`].
    pub fn new(group: Arc<Group>, form: HandleForm) -> Self {
        let mode = match &group.backend().mode {
            ByMode::Ll(group) => ByMode::Ll((Arc::clone(group), Mutex::default())),
            ByMode::Ht(group) => ByMode::Ht((Arc::clone(group), RwLock::default())),
        };
        Self { mode, given: None, form, life: HandleLife::default(), group }
    }

    /// The same, with its block in a caller's `memory` of `bytes`, at least [`Group::handle_bytes`]; every routing has
    /// `top_k` ids per token. Nothing is touched there until an update (in LL, a dispatch) has run on its stream.
    ///
    /// A block that an equal handle has stored there, or a copy of one from any address, may be used without an update
    /// (HT), or without a dispatch (LL, which needs its ids). The device checks that there is one, and the group fails
    /// if not; over several nodes the host checks, so operations wait until their stream gets to them, and LL does not
    /// use the memory. In HT either all ranks' handles lie in callers' memory or none does, and the blocks are of the
    /// same update. An abandoned staged operation uses the memory until the group's next staged operation in its slot,
    /// or the group's end.
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
        Ok(Self { given: Some(Given { block, top_k }), ..Self::new(group, form) })
    }

    /// Replaces the routing by that of `tensors`, which is an error if they could not be read. Collective in HT. A
    /// refusal leaves this rank's routing as it was; but in HT other ranks may have dropped theirs, as those on the
    /// GPUs of one node learn of the refusal later: an operation on the old routing then waits for them until the
    /// deadline.
    pub fn update(&self, tensors: Result<HandleTensors>, stream: Stream) -> Result<()> {
        self.group.check_usable()?;
        let _entered = self.group.enter()?;
        let own = Own { given: self.given.as_ref(), form: self.form, life: &self.life };
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

    /// Closes the handle; abandons its staged operation.
    pub fn close(&self) {
        if let ByMode::Ll((_, handle)) = &self.mode {
            let mut handle = handle.lock();
            let sent = handle.staged.take();
            if let (Some(sent), Some(routed)) = (sent, &handle.routed) {
                routed.backend.abandon(&sent.op, sent.slot);
                self.group.end_staged(sent.slot);
            }
            // Nothing can start any more, even on a thread that is about to.
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
            Lie::of(tensors.out_ids.is_some(), tensors.out_tokens.is_some_and(|out| out.data.is_null()))
        });
        match &self.mode {
            ByMode::Ll((_, handle)) => {
                let mut handle = handle.lock();
                let op = LlDispatch {
                    launch: chosen.launch,
                    waits: self.group.place_of(Statistic::Waits),
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
                if !staged {
                    // After the operation is recorded as dispatched: it runs even if counting fails.
                    self.count(&*routed(&handle.routed)?.backend, &LlOp::Dispatch(op), stream)?;
                }
                Ok(out)
            }
            ByMode::Ht(ht) => self.with_ht(ht, (Role::TokensIn, tensors.tokens), |routed| {
                let mut op = ht::dispatch(facts, &routed.routing, tensors)?;
                (op.launch, op.way) = (chosen.launch, chosen.way);
                ht::dispatch_holds(&routed.routing, &op, routed.rows_to_hold(facts))?;
                if let Some(checks) = self.group.checks() {
                    checks.ht_dispatch(&routed.routing, &op, stream);
                }
                routed.backend.dispatch(&op, stream)?;
                if let Some(totals) = self.group.place_of(Statistic::Rows) {
                    routed.backend.add_counts(totals, stream)?;
                }
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
            Lie::of(handle.dispatched.is_some_and(Layout::is_rank_major), handle.view.is_some())
        });
        match &self.mode {
            ByMode::Ll((_, handle)) => {
                let mut handle = handle.lock();
                let routing = &routed(&handle.routed)?.routing;
                let layout = match handle.dispatched {
                    Some(layout) => layout,
                    None if self.given.is_none() => {
                        return Err(Error::usage(Subject::Handle, InSequence::DispatchFirst));
                    }
                    // The device compares this guess with the block's header.
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
                    waits: self.group.place_of(Statistic::CombineWaits),
                    ..op
                };
                self.start(&mut handle, &LlOp::Combine(op), staged, stream)
            }
            ByMode::Ht(ht) => self.with_ht(ht, (Role::TokensOut, tensors.out_tokens), |routed| {
                let mut op = ht::combine(facts, &routed.routing, tensors)?;
                (op.launch, op.way) = (chosen.launch, chosen.way);
                op.waits = self.group.place_of(Statistic::CombineWaits);
                ht::combine_holds(&op, routed.rows_to_hold(facts))?;
                routed.backend.combine(&op, stream)
            }),
        }
    }

    /// What was chosen for this handle's operation of either mode, on rows like `rows`, where peers may map `mapped`.
    /// The handle's lock is not held meanwhile, so the routing may change before the operation is checked. A routing in
    /// a caller's memory is known only to have as many tokens as this rank's rows, `own`.
    #[inline]
    fn chosen(
        &self,
        [of_ll, of_ht]: [Operation; 2],
        [rows, mapped, own]: [Option<&Tensor>; 3],
        lie: impl FnOnce(&LlHandle) -> Lie,
    ) -> Chosen {
        let about = |tokens, top_k, lie| About {
            lie,
            tokens,
            top_k,
            row_bytes: rows.and_then(Tensor::row_bytes).unwrap_or(0),
            mapped: mapped.is_some_and(|it| self.group.is_mapped(it.data)),
        };
        let choices = &self.group.choices;
        match &self.mode {
            ByMode::Ll((_, handle)) => choices.of(of_ll, || {
                let handle = handle.lock();
                let lie = Some(lie(&handle));
                handle.routed.as_ref().map(|it| about(it.routing.tokens, it.routing.top_k, lie))
            }),
            ByMode::Ht((_, handle)) => choices.of(of_ht, || match &self.given {
                Some(given) => own.and_then(|it| it.sizes().first()).map(|&it| about(it as usize, given.top_k, None)),
                None => handle.read().as_ref().map(|it| about(it.routing.tokens, it.routing.top_k, None)),
            }),
        }
    }

    /// Enqueues an HT operation on as many tokens of this rank as `rows` has. A caller's memory may hold any routing by
    /// now, so only the number of tokens is known of it.
    #[inline]
    fn with_ht<T>(
        &self,
        (backend, handle): &Ht,
        rows: (Role, Option<&Tensor>),
        run: impl FnOnce(&Routed<dyn HtBackend>) -> Result<T>,
    ) -> Result<T> {
        let Some(given) = &self.given else { return run(routed(&handle.read())?) };
        let of = (given.top_k, self.form);
        let routing = rule::handle::routed_before(self.group.facts(), rows, of)?;
        let cached = handle.read();
        if let Some(routed) = &*cached
            && routed.routing.tokens == routing.tokens
        {
            return run(routed);
        }
        drop(cached);
        let routed = route::ht_before(backend, routing, given)?;
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
        if !staged {
            return backend.run(op, stream);
        }
        let send = |slot| backend.send(op, slot, stream);
        handle.staged = Some(Sent { op: *op, slot: self.group.send_staged(send)?, view: None });
        Ok(())
    }

    /// Adds what LL operation `op` delivered to the group's totals, if it counts by expert.
    fn count(&self, backend: &dyn LlBackend, op: &LlOp, stream: Stream) -> Result<()> {
        match (self.group.place_of(Statistic::Rows), op.rows_of_experts()) {
            (Some(totals), Some(counts)) => backend.add_counts(counts, totals, stream),
            _ => Ok(()),
        }
    }

    /// What to receive of a staged operation: no rows if another dispatch has taken its view's bank.
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
        // If this is refused, the operation stays pending: the caller may try again.
        let Routed { routing, backend, .. } = routed(&handle.routed)?;
        if let Some(checks) = self.group.checks() {
            checks.ll_receive(routing, &sent.op, stream);
        }
        backend.receive(&self.received(sent), sent.slot, stream)?;
        let counted = self.count(&**backend, &sent.op, stream);
        self.group.end_staged(sent.slot);
        handle.staged = None;
        counted
    }

    /// The most rows that an HT dispatch can deliver: the bound of the group, or that on a routing's slots; in a group
    /// without a bound the exact number, or none if it is not known `within` that time.
    pub fn num_recv_tokens(&self, within: Duration) -> Result<Option<usize>> {
        match (&self.mode, self.group.facts().recv_rows()) {
            (ByMode::Ht(_), Some(rows)) if self.form.zones.is_none() => Ok(Some(rows)),
            (ByMode::Ht((_, handle)), Some(_)) => Ok(routed(&handle.read())?.most_rows(self.group.facts())),
            _ => self.expected_rows(within),
        }
    }

    /// As [`Handle::received_rows`]; later operations on fewer rows are refused. Not in groups with a bound: there a
    /// rank that gets more rows fails while the operation runs, so that the others hear of it.
    fn expected_rows(&self, within: Duration) -> Result<Option<usize>> {
        let rows = self.received_rows(within)?;
        if let (ByMode::Ht((_, handle)), None, Some(rows)) = (&self.mode, &self.given, rows) {
            routed(&handle.read())?.told.store(rows, Ordering::Relaxed);
        }
        Ok(rows)
    }

    /// The same for the block in a caller's memory at that point of `stream`; none if it is no routing of this handle's
    /// tokens, or if nothing has run on it yet.
    pub fn rows_in_memory(&self, stream: Stream) -> Result<Option<usize>> {
        match (&self.given, &self.mode) {
            (Some(_), ByMode::Ht((_, handle))) => match &*handle.read() {
                Some(routed) => routed.backend.num_recv_tokens_in_block(stream),
                None => Ok(None),
            },
            _ => self.expected_rows(Duration::MAX),
        }
    }

    /// The rows that an HT dispatch delivers to this rank; none if the routing is not exchanged `within` that time.
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

//! The checks of `NCCL_EP_CHECK=1`: report unusual ids and weights before they are used, and poison outputs so that
//! reads beyond the delivered rows are noticed. Slow, as each call waits for its stream.
//!
//! A check refuses nothing, as what it reports has defined behaviour. During capture it cannot read the tensors.

use crate::backend::device::{Device, StreamMark};
use crate::env::Env;
use crate::error::Result;
use crate::log;
use crate::model::group::GroupFacts;
use crate::model::ops::{HtDispatch, LlDispatch, LlOp, Routing, Stream};
use crate::model::scales::ScaleTensor;
use crate::model::tensor::DevPtr;
use crate::session::findings::Findings;
use parking_lot::Mutex;
use std::iter;
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// NaN in every floating-point type, UE8M0 among them; -1 in an integer.
const POISON: u8 = 0xff;
/// Bytes of poison that are copied at a time.
const POISON_BYTES: usize = 1 << 20;
const LL_DISPATCH: &str = "low-latency dispatch";
const PAUSE: Duration = Duration::from_micros(50);

pub(super) struct Checks {
    device: Arc<dyn Device>,
    facts: GroupFacts,
    /// How long a check waits for its stream.
    timeout: Duration,
    /// Behind the group's last operation, if no check has waited for it: what it reads on another stream must not be
    /// poisoned before.
    last: Mutex<Result<Option<Box<dyn StreamMark>>>>,
    warned_of_captures: AtomicBool,
}

impl Checks {
    /// The checks of a group, if the environment asks for them.
    pub(super) fn from_env(env: &Env, facts: &GroupFacts, timeout: Duration, device: Arc<dyn Device>) -> Option<Self> {
        env.check.then(|| Self {
            device,
            facts: *facts,
            timeout,
            last: Mutex::new(Ok(None)),
            warned_of_captures: AtomicBool::new(false),
        })
    }

    /// To be called after each operation, or part of one, that was enqueued on `stream`: later checks wait for it.
    pub(super) fn follow(&self, stream: Stream) {
        match self.mark(stream) {
            Ok(None) => {}
            mark => *self.last.lock() = mark,
        }
    }

    /// To be called before an HT handle is created with `routing`.
    pub(super) fn ht_handle(&self, routing: &Routing, stream: Stream) {
        let call = "high-throughput handle";
        self.during(call, stream, || self.inspect(call, routing, true, None));
    }

    /// To be called before an HT dispatch, whose ids were checked with the handle.
    pub(super) fn ht_dispatch(&self, routing: &Routing, op: &HtDispatch, stream: Stream) {
        let Some(own) = op.routing_in else { return };
        if routing.form.keeps_ids {
            return;
        }
        let routing = Routing { ids: own.ids, ..*routing };
        let call = "high-throughput dispatch";
        self.during(call, stream, || self.inspect(call, &routing, false, Some(own.weights)));
    }

    /// To be called before an LL operation or its send phase.
    pub(super) fn ll(&self, routing: &Routing, op: &LlOp, staged: bool, stream: Stream) {
        match op {
            LlOp::Dispatch(op) => self.during(LL_DISPATCH, stream, || {
                if !staged {
                    self.poison(op, routing.top_k)?;
                }
                self.inspect(LL_DISPATCH, routing, true, op.topk.map(|it| it.weights))
            }),
            // The caller may have masked ids since the dispatch. Rank-major combines have no weights.
            LlOp::Combine(op) if op.weights.is_some() => {
                let call = "low-latency combine";
                self.during(call, stream, || self.inspect(call, routing, false, op.weights));
            }
            LlOp::Combine(_) => {}
        }
    }

    /// To be called before the receive phase of an LL operation.
    pub(super) fn ll_receive(&self, routing: &Routing, op: &LlOp, stream: Stream) {
        if let LlOp::Dispatch(op) = op {
            self.during(LL_DISPATCH, stream, || self.poison(op, routing.top_k));
        }
    }

    /// Runs `check` after the group's last operation and all earlier work on `stream` have ended; if that is
    /// impossible, reports why.
    fn during(&self, call: &str, stream: Stream, check: impl FnOnce() -> Result<()>) {
        let why_not = match self.wait_for(stream) {
            Ok(StreamState::Yes) => match check() {
                Ok(()) => return,
                Err(error) => error.text(),
            },
            Ok(StreamState::Busy) => {
                let waited = self.timeout.as_millis();
                format!("its stream was busy for {waited} ms")
            }
            Ok(StreamState::Captured) if self.warned_of_captures.swap(true, Ordering::Relaxed) => return,
            Ok(StreamState::Captured) => "it is captured into a graph; that is said once".to_owned(),
            Err(error) => error.text(),
        };
        self.report(call, &format!("not checked: {why_not}"));
    }

    fn report(&self, call: &str, text: &str) {
        let rank = self.facts.rank;
        log::check(&format!("NCCL_EP_CHECK: rank {rank}, {call}: {text}"));
    }

    /// A mark behind the work on `stream`; `None` while that is captured.
    fn mark(&self, stream: Stream) -> Result<Option<Box<dyn StreamMark>>> {
        let mut mark = self.device.new_mark()?;
        Ok(mark.record(stream)?.then_some(mark))
    }

    fn wait_for(&self, stream: Stream) -> Result<StreamState> {
        let Some(mark) = self.mark(stream)? else { return Ok(StreamState::Captured) };
        let last = mem::replace(&mut *self.last.lock(), Ok(None))?;
        let begin = Instant::now();
        while !mark.is_over()? || !last.as_ref().map_or(Ok(true), |it| it.is_over())? {
            if begin.elapsed() > self.timeout {
                return Ok(StreamState::Busy);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(StreamState::Yes)
    }

    /// Reports unusual ids of `routing` if they `are_new`, and unusual `weights` if there are any.
    fn inspect(&self, call: &str, routing: &Routing, are_new: bool, weights: Option<DevPtr>) -> Result<()> {
        let entries = routing.tokens * routing.top_k;
        let ids = self.read(routing.ids, entries * routing.width.bytes())?;
        let ids = routing.width.widened(&ids);
        let mut found = Findings::new(self.facts.experts);
        if are_new {
            found.add_ids(&ids, routing.top_k);
        }
        if let Some(weights) = weights {
            found.add_weights((&ids, &self.read(weights, entries * size_of::<f32>())?), routing.top_k);
        }
        if !found.is_empty() {
            self.report(call, &found.to_string());
        }
        Ok(())
    }

    fn read(&self, from: DevPtr, bytes: usize) -> Result<Vec<u8>> {
        let mut copy = vec![0; bytes];
        if bytes > 0 {
            self.device.download(&mut copy, from)?;
        }
        Ok(copy)
    }

    /// Poisons the outputs of an LL dispatch, which writes only the rows that it delivers. Not of an HT dispatch, which
    /// zeroes the rest.
    fn poison(&self, op: &LlDispatch, top_k: usize) -> Result<()> {
        let rows = op.layout.rows().unwrap_or(0);
        // Nothing but the dispatch may write to a view.
        if op.view.is_none() {
            self.fill(op.out, rows * op.row.bytes())?;
        }
        if let Some(topk) = &op.topk {
            self.fill(topk.out_weights, rows * top_k * size_of::<f32>())?;
        }
        let Some(scaled) = &op.scaled else { return Ok(()) };
        let (out, width) = (&scaled.out, scaled.scales.dtype.size());
        let zones = rows / out.rows.max(1);
        for run in runs(out, zones, scaled.scales.count) {
            self.fill(DevPtr(out.data.0 + run.start * width), run.len() * width)?;
        }
        Ok(())
    }

    fn fill(&self, data: DevPtr, bytes: usize) -> Result<()> {
        let poison = vec![POISON; bytes.min(POISON_BYTES)];
        let mut filled = 0;
        while filled < bytes {
            let part = poison.get(..bytes - filled).unwrap_or(&poison);
            self.device.upload(DevPtr(data.0 + filled), part)?;
            filled += part.len();
        }
        Ok(())
    }
}

/// The elements of `scales` as contiguous runs; gaps between the runs are not part of the tensor.
fn runs(scales: &ScaleTensor, experts: usize, columns: usize) -> Vec<Range<usize>> {
    let ScaleTensor { rows, layout, .. } = *scales;
    let together = experts == 1 || layout.expert == rows * columns;
    if together && (layout.column, layout.row) == (1, columns) {
        return iter::once(0..experts * rows * columns).collect();
    }
    let by_row = layout.column == 1 || columns == 1;
    let (number, length) = if by_row { (rows, columns) } else { (columns, rows) };
    let of_expert = |expert| {
        (0..number).map(move |run| {
            let (row, column) = if by_row { (run, 0) } else { (0, run) };
            let first = layout.element(expert, row, column);
            first..first + length
        })
    };
    (0..experts).flat_map(of_expert).collect()
}

/// Whether a stream's earlier work has ended.
enum StreamState {
    Yes,
    Busy,
    Captured,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::scales::ScaleLayout;

    /// Each scale is in exactly one run, and nothing else is in any.
    #[test]
    fn runs_are_the_scales_alone() {
        for (extents, strides, number) in [
            ([2, 3, 4], None, 1),
            ([2, 3, 4], Some([40, 6, 1]), 6),
            ([2, 3, 4], Some([40, 1, 8]), 8),
            ([2, 3, 1], Some([40, 5, 7]), 6),
            ([2, 1, 4], Some([40, 9, 5]), 8),
            ([1, 3, 4], Some([0, 4, 1]), 1),
            ([2, 0, 4], None, 1),
        ] {
            let [experts, rows, columns] = extents;
            let layout = ScaleLayout::new(extents, strides).unwrap();
            let scales = ScaleTensor { data: DevPtr(0), rows, layout };
            let mut expected: Vec<usize> = (0..experts * rows * columns)
                .map(|at| (at / columns / rows, at / columns % rows, at % columns))
                .map(|(expert, row, column)| layout.element(expert, row, column))
                .collect();
            let runs = runs(&scales, experts, columns);
            assert_eq!(runs.len(), number, "{extents:?} {strides:?}");
            let mut found: Vec<usize> = runs.into_iter().flatten().collect();
            expected.sort_unstable();
            found.sort_unstable();
            assert_eq!(found, expected, "{extents:?} {strides:?}");
        }
    }
}

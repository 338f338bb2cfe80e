//! Operations with zones over several nodes. The rows travel like others, into memory of the library's; a kernel copies
//! them from there to their slots, or sums the slots there. That writes rows once more, which the network hides.

use crate::backend::HtBackend;
use crate::backend::cuda::ht::kept::{self, Told};
use crate::backend::cuda::ht::nodes::handle::NodesHt;
use crate::backend::cuda::ht::nodes::{combine, dispatch};
use crate::backend::cuda::ht::shared::{HtShared, saturated};
use crate::backend::cuda::kernels::{self, LaunchShape, to_u32};
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht_kept::{HT_APART_THREADS, HtGatherParams, HtSpreadParams, HtZones};
use crate::backend::cuda::scaled_rows::{NO_SCALES, scaled_rows};
use crate::error::{Error, Result};
use crate::model::ops::{HtCombine, HtDispatch, IdsAndWeights, RoutingCounters, Rows, Stream, WeightGradients};
use crate::model::regions::Regions;
use crate::model::scales::{ScaleLayout, ScaleSource, ScaleTensor, Scaled};
use crate::model::tensor::DevPtr;
use std::ptr::null_mut;
use std::time::Duration;

const ALIGN: usize = 256;
const WARP: usize = 32;
const MOST_BLOCKS: usize = 512;

/// Rows in arrival order, with what accompanies them.
struct Apart {
    rows: DevPtr,
    scales: DevPtr,
    ids: DevPtr,
    weights: DevPtr,
}

/// Bytes for `rows` such rows in any operation.
pub fn bytes_apart(group: &HtShared, rows: usize, top_k: usize) -> usize {
    let row = group.plan.facts.row_bytes + top_k * (size_of::<i64>() + size_of::<f32>());
    rows * row + 4 * ALIGN
}

impl NodesHt {
    fn zones(&self) -> Result<Option<HtZones>> {
        let parts = self.parts()?;
        self.group.zones(self.routing.form.zones, (parts.slots, parts.zones), self.routing.top_k)
    }

    fn apart(&self, payload: usize, scales: usize) -> Result<Apart> {
        let memory = self.apart.as_ref().ok_or_else(|| Error::internal("rows by expert without memory"))?;
        let mut regions = Regions::new(ALIGN);
        let mut take = |bytes: usize| DevPtr(memory.data().0 + regions.take(self.rows * bytes));
        let top_k = self.routing.top_k;
        Ok(Apart {
            rows: take(payload),
            scales: take(scales),
            ids: take(top_k * size_of::<i64>()),
            weights: take(top_k * size_of::<f32>()),
        })
    }

    fn grid(&self) -> Result<LaunchShape> {
        let units = self.rows.max(self.group.layout.local_experts as usize);
        let blocks = units.div_ceil(HT_APART_THREADS as usize / WARP).clamp(1, MOST_BLOCKS);
        Ok(LaunchShape::new(to_u32(blocks)?, HT_APART_THREADS))
    }
}

impl HtBackend for NodesHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        let Some(zones) = self.zones()? else {
            return dispatch::run(self, op, stream, |_| Ok(()));
        };
        let (payload, scales, rows) = (op.row.bytes(), op.wire().scale_bytes(), self.rows);
        let apart = self.apart(payload, scales)?;
        let flat = HtDispatch {
            out: op.out.map(|_| Rows { data: apart.rows, rows }),
            scaled: op.scaled.map(|it| Scaled { out: scales_apart(&it, &apart, rows), ..it }),
            routing_out: op.routing_out.map(|_| IdsAndWeights { ids: apart.ids, weights: apart.weights, rows }),
            counters: RoutingCounters::default(),
            ..*op
        };
        let (group, device) = (&*self.group, self.device()?);
        let from = |it: &Scaled| ScaleSource::Forward(scales_apart(it, &apart, rows));
        let spread = op.scaled.map(|it| scaled_rows(op.row, &Scaled { source: from(&it), ..it })).transpose()?;
        let params = HtSpreadParams {
            peers: *group.context.peers(),
            wait: group.context.wait(KernelOp::HtDispatch),
            zones,
            counts: device.counts,
            rows: apart.rows.0 as *const u8,
            out: op.out.map_or(null_mut(), |out| out.data.0 as *mut u8),
            scales: spread.unwrap_or(NO_SCALES),
            row_bytes: to_u32(payload)?,
            out_rows: op.out.map_or(u32::MAX, |out| saturated(out.rows)),
            scale_rows: op.scaled.map_or(u32::MAX, |it| saturated(it.out.rows)),
            weights: apart.weights.0 as *const f32,
            out_weights: op.routing_out.map_or(null_mut(), |out| out.weights.0 as *mut f32),
            weight_rows: op.routing_out.map_or(u32::MAX, |out| saturated(out.rows)),
            received: to_u32(rows)?,
            top_k: device.top_k,
        };
        let shape = self.grid()?;
        dispatch::run(self, &flat, stream, |at| {
            group.context.module.launch(kernels::ht_spread(), shape, &params, at)?;
            let (rows, counts) = (device.total.cast_const(), device.counts.cast_const());
            kept::tell(group, &Told { rows, counts, counters: &op.counters, zones: Some(zones) }, at)
        })
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        let Some(zones) = self.zones()? else {
            return combine::run(self, op, stream, |_| Ok(()));
        };
        let (bytes, rows) = (op.row.bytes(), self.rows);
        let apart = self.apart(bytes, 0)?;
        let flat = HtCombine {
            expert_rows: Rows { data: apart.rows, rows },
            gradients: op.gradients.map(|it| WeightGradients { input: apart.weights, ..it }),
            ..*op
        };
        let group = &*self.group;
        let params = HtGatherParams {
            peers: *group.context.peers(),
            wait: group.context.wait(KernelOp::HtCombine),
            zones,
            rows: op.expert_rows.data.0 as *const u8,
            out: apart.rows.0 as *mut u8,
            gradients: op.gradients.map_or(0, |it| it.input.0) as *const f32,
            out_gradients: apart.weights.0 as *mut f32,
            in_rows: saturated(op.expert_rows.rows),
            received: to_u32(rows)?,
            row_bytes: to_u32(bytes)?,
            columns: to_u32(op.gradients.map_or(0, |it| it.top_k))?,
        };
        let (kernel, shape) = (kernels::ht_gather(op.row.dtype)?, self.grid()?);
        let launch = |at: &_| group.context.module.launch(kernel, shape, &params, at);
        combine::run(self, &flat, stream, launch)
    }

    fn add_counts(&self, totals: DevPtr, stream: Stream) -> Result<()> {
        let counts = self.device()?.counts;
        (self.group).add_counts(counts, totals, &self.group.enter(stream)?)
    }

    fn num_recv_tokens(&self, _within: Duration) -> Result<Option<usize>> {
        Ok(Some(self.slots.unwrap_or(self.rows)))
    }
}

fn scales_apart(scaled: &Scaled, apart: &Apart, rows: usize) -> ScaleTensor {
    let count = scaled.scales.count;
    ScaleTensor { data: apart.scales, rows, layout: ScaleLayout { expert: rows * count, row: count, column: 1 } }
}

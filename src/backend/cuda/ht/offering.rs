//! Operations on a handle that make offers, as the group has memory that peers map.

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::handle::CudaHt;
use crate::backend::cuda::ht::mapped::{Offer, Staged, mapped};
use crate::backend::cuda::ht::plan::HtLaunch;
use crate::backend::cuda::ht::scaled;
use crate::backend::cuda::kernels;
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht::{HtCombineParams, HtDispatchParams, HtScaledDispatchParams};
use crate::backend::cuda::params::ht_mapped::{
    HT_OFFER_THREADS, HtDirectParams, HtOfferParams, HtPullParams, HtScaledDirectParams,
};
use crate::error::Result;
use crate::model::ops::{HtCombine, HtDispatch};

impl CudaHt {
    /// Whether operations make offers, which all ranks know alike.
    pub(super) fn makes_offers(&self) -> bool {
        let group = &*self.group;
        group.plan.ranks() > 1 && group.context.objects().any()
    }

    /// Enqueues a dispatch whose kernel through rings would have the parameters `rows`.
    // Apart, so that others do not pay for it.
    #[inline(never)]
    pub(super) fn dispatch_with_offers(
        &self,
        op: &HtDispatch,
        rows: HtDispatchParams,
        launch: &HtLaunch,
        at: &StreamScope,
        after: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (group, name) = (&*self.group, KernelOp::HtDispatch);
        let offer = Offer::of_dispatch(group, op, launch);
        let staged = Staged::of_dispatch(group.plan.ranks(), op.row.bytes(), launch)?;
        let mapped = mapped(group, &offer, launch, &staged)?;
        let shape = staged.launch(launch.launch)?;
        let Some(given) = &op.scaled else {
            let kernel = kernels::ht_dispatch_direct();
            return self.enqueue(name, kernel, shape, &HtDirectParams { rows, mapped }, at, after);
        };
        let common = rows.common;
        let scaled = scaled::from_caller(op.row, given, launch)?;
        let rows = HtScaledDispatchParams { rows, scaled };
        if given.cast().is_none() {
            let params = HtScaledDirectParams { rows, mapped };
            return self.enqueue(name, kernels::ht_dispatch_direct_scaled(), shape, &params, at, after);
        }
        let one_block = LaunchShape::new(1, HT_OFFER_THREADS);
        let params = HtOfferParams { common, mapped };
        self.enqueue(name, kernels::ht_offer(), one_block, &params, at, || {
            let (kernel, shape) = (kernels::ht_dispatch_cast(), launch.launch);
            (group.context.module).launch(kernel, shape, &rows, at)?;
            after()
        })
    }

    /// The same for a combine.
    #[inline(never)]
    pub(super) fn combine_with_offers(
        &self,
        op: &HtCombine,
        rows: HtCombineParams,
        launch: &HtLaunch,
        at: &StreamScope,
        after: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let group = &*self.group;
        let offer = Offer::of_combine(group, op, launch);
        let rows_of_token = self.routing.top_k.min(group.plan.ranks());
        let shared_bytes = group.device.dynamic_shared_bytes();
        let staged = Staged::of_combine(op.row.bytes(), launch, rows_of_token, shared_bytes);
        let mapped = mapped(group, &offer, launch, &staged)?;
        let shape = staged.launch(launch.launch)?;
        let kernel = kernels::ht_combine_pull(op.row.dtype)?;
        self.enqueue(KernelOp::HtCombine, kernel, shape, &HtPullParams { rows, mapped }, at, after)
    }
}

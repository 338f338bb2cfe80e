//! Memory that the ranks of a node map of each other: a group's objects, as callers make and end them.

use crate::backend::objects::{Found, Kind, Wanted};
use crate::error::refusal::{InSequence, OfMemory, Subject};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use crate::session::group::Group;

impl Group {
    /// Makes an object of new memory of so many `bytes`, which the caller ends by [`Group::free_memory`], or the group's
    /// end does. `bytes` is an error if they could not be read. Collective, in one order on all ranks.
    pub fn allocate_memory(&self, bytes: Result<usize>) -> Result<DevPtr> {
        let wanted = bytes.map(Wanted::New);
        self.exchange(|stream| self.backend().common.objects().make(wanted, Kind::Own, stream))
    }

    /// Ends the object of [`Group::allocate_memory`] at `data`, and frees it. Collective.
    pub fn free_memory(&self, data: DevPtr) -> Result<()> {
        self.exchange(|stream| self.backend().common.objects().end(data, Kind::Own, stream))
    }

    /// Makes an object of the caller's memory, `bytes` at `data`, until [`Group::forget_memory`]. Collective.
    pub fn register_memory(&self, given: Result<(DevPtr, usize)>) -> Result<()> {
        let wanted = given.map(|(data, bytes)| Wanted::Given(data, bytes));
        self.exchange(|stream| self.backend().common.objects().make(wanted, Kind::Given, stream)).map(drop)
    }

    /// Ends the object of [`Group::register_memory`] at `data`, which stays the caller's. Collective.
    pub fn forget_memory(&self, data: DevPtr) -> Result<()> {
        self.exchange(|stream| self.backend().common.objects().end(data, Kind::Given, stream))
    }

    /// The address of a view by `view`, for a dispatch on `stream`. The first one whose rows stay where they arrive meets
    /// the other ranks, as NCCL's first collective does: most groups have no views, and their memory is twice the
    /// received rows. A dispatch into a view is one of all ranks; where some ask for none, all reach their deadlines.
    pub(super) fn view_at(&self, view: impl Fn() -> Result<Option<DevPtr>>, stream: Stream) -> Result<DevPtr> {
        if let Some(at) = view()? {
            return Ok(at);
        }
        if self.device().is_captured(stream)? {
            return Err(Error::usage(Subject::Stream, InSequence::NoCaptureOfViews));
        }
        self.exchange(|own| self.backend().common.make_views(own))?;
        view()?.ok_or_else(|| Error::internal("views without memory"))
    }

    /// Whether peers map the byte at `data`.
    pub(super) fn is_mapped(&self, data: DevPtr) -> bool {
        self.backend().common.objects().find(data).is_some()
    }

    /// What object the byte at `data` is in.
    pub fn memory_at(&self, data: DevPtr) -> Result<Found> {
        let found = self.backend().common.objects().find(data);
        found.ok_or_else(|| Error::argument(Subject::Memory, OfMemory::OfGroup))
    }

    /// Meets the other ranks by `call`, on a stream of the library's own. If one never comes, the group has failed.
    fn exchange<T>(&self, call: impl FnOnce(Stream) -> Result<T>) -> Result<T> {
        self.check_usable()?;
        let _entered = self.enter()?;
        call(self.own_stream()?).inspect_err(|_| {
            if let Some(lost) = self.backend().common.objects().lost() {
                self.mark_failed(lost);
            }
        })
    }
}

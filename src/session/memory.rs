//! A group's objects: memory that the ranks of a node map of each other, allocated or registered by callers.

use crate::backend::objects::{Found, Kind, Wanted};
use crate::error::refusal::{InSequence, OfMemory, Subject};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use crate::session::group::Group;
use std::ops::Range;

impl Group {
    /// Allocates an object of `bytes`, which is an error if it could not be read; valid until [`Group::free_memory`] or
    /// the group's end. Collective, in the same order on all ranks.
    pub fn allocate_memory(&self, bytes: Result<usize>) -> Result<DevPtr> {
        let wanted = bytes.map(Wanted::New);
        self.exchange(|stream| self.backend().common.objects().make(wanted, Kind::Own, stream))
    }

    /// Frees the object that [`Group::allocate_memory`] has returned. Collective.
    pub fn free_memory(&self, data: DevPtr) -> Result<()> {
        self.exchange(|stream| self.backend().common.objects().end(data, Kind::Own, stream))
    }

    /// Registers the caller's memory, `bytes` at `data`, as an object until [`Group::forget_memory`]. Collective.
    pub fn register_memory(&self, given: Result<(DevPtr, usize)>) -> Result<()> {
        let wanted = given.map(|(data, bytes)| Wanted::Given(data, bytes));
        self.exchange(|stream| self.backend().common.objects().make(wanted, Kind::Given, stream)).map(drop)
    }

    /// Deregisters the object of [`Group::register_memory`] at `data`; the memory stays the caller's. Collective.
    pub fn forget_memory(&self, data: DevPtr) -> Result<()> {
        self.exchange(|stream| self.backend().common.objects().end(data, Kind::Given, stream))
    }

    /// The address of the view that `view` returns for a dispatch on `stream`. The group's first such dispatch is
    /// collective, as it allocates the views, which take twice the size of the received rows and which most groups do
    /// not use. If some ranks dispatch into views and others do not, all time out.
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

    /// The addresses of memory that the library allocated for its caller: of views each one's first byte, and objects.
    pub fn owned(&self) -> Vec<Range<u64>> {
        let views = self.views_at().into_iter().map(|at| at.0 as u64..at.0 as u64 + 1);
        let objects = self.backend().common.objects().own().into_iter().map(|it| it.begin..it.end());
        views.chain(objects).collect()
    }

    /// The object that contains the byte at `data`.
    pub fn memory_at(&self, data: DevPtr) -> Result<Found> {
        let found = self.backend().common.objects().find(data);
        found.ok_or_else(|| Error::argument(Subject::Memory, OfMemory::OfGroup))
    }

    /// Runs the collective `call` on a stream of the library's own. If a rank never comes, the group has failed.
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

//! Copies that a stream runs in its order, in graphs, too; nobody waits for them here.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{check, functions};
use crate::backend::cuda::driver::memory::{HostPage, Record};
use crate::backend::cuda::driver::raw_stream;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::error::{Error, Result};
use crate::model::tensor::DevPtr;

impl<T: Record> HostPage<T> {
    /// Enqueues a copy of `count` records from `index` on to the device.
    pub fn copy_out(&self, index: usize, count: usize, to: DevPtr, at: &StreamScope) -> Result<()> {
        let from = self.range(index, count)?;
        // SAFETY: inside the page, whose owner keeps it until the stream has come past this.
        check("cuMemcpyHtoDAsync", unsafe {
            let copy = functions()?.cuMemcpyHtoDAsync_v2;
            copy(
                to.0 as u64,
                from.cast(),
                count * size_of::<T>(),
                raw_stream(at.stream),
            )
        })
    }

    /// Enqueues a copy of `count` records of the device to those from `index` on.
    pub fn copy_in(
        &self,
        index: usize,
        count: usize,
        from: DevPtr,
        at: &StreamScope,
    ) -> Result<()> {
        let to = self.range(index, count)?;
        // SAFETY: as for `copy_out`.
        check("cuMemcpyDtoHAsync", unsafe {
            let copy = functions()?.cuMemcpyDtoHAsync_v2;
            copy(
                to.cast(),
                from.0 as u64,
                count * size_of::<T>(),
                raw_stream(at.stream),
            )
        })
    }

    fn range(&self, index: usize, count: usize) -> Result<*mut T> {
        if index + count > self.count() {
            return Err(Error::internal("a copy past the end of a page"));
        }
        // SAFETY: inside the allocation.
        Ok(unsafe { self.host().add(index) })
    }
}

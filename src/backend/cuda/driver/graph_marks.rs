//! Marks that operations in graphs leave in every replay.
//!
//! They are copies of single words, so they need neither a kernel nor a multiprocessor. An operation begins with
//! a copy of the present tick to its place in device memory, and ends with a copy of a zero. Each look copies all
//! places to the host and moves the tick on: a place that keeps its tick over several looks is in one replay.
#![allow(unsafe_code)]

use crate::backend::ReplayMarks;
use crate::backend::cuda::driver::api::{check, functions};
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::event::ApartFromCaptures;
use crate::backend::cuda::driver::held::Key;
use crate::backend::cuda::driver::memory::HostPage;
use crate::backend::cuda::driver::{self, raw_stream};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::mem::ManuallyDrop;
use std::sync::Arc;

const WORD: usize = size_of::<u32>();
/// Words of the page: what a begin copies, what an end copies, and the places as a look found them.
const TICK: usize = 0;
const ZERO: usize = 1;
const FOUND: usize = 2;

/// The marks of one sequence of operations.
pub struct GraphMarks {
    context: Arc<Context>,
    /// For looks alone.
    stream: Stream,
    page: ManuallyDrop<HostPage<u32>>,
    places: DevPtr,
    found: Vec<u32>,
    tick: u32,
    is_asked: bool,
    is_in_graphs: bool,
}

impl GraphMarks {
    /// `places` places of operations that are not in graphs yet.
    pub fn new(context: &Arc<Context>, places: usize) -> Result<Self> {
        let page = HostPage::new(context, FOUND + places)?;
        page.write(TICK, 1);
        let bytes = places * WORD;
        let _entered = context.enter()?;
        let left = context.take(&Key::Memory(bytes));
        let marks = Self {
            context: Arc::clone(context),
            stream: driver::create_stream()?,
            page: ManuallyDrop::new(page),
            places: left.map_or_else(|| driver::alloc(bytes), |it| Ok(DevPtr(it.address)))?,
            found: vec![0; places],
            tick: 1,
            is_asked: false,
            is_in_graphs: false,
        };
        driver::upload(marks.places, &vec![0; bytes], marks.stream)?;
        Ok(marks)
    }

    /// Captures a copy of word `word` of the page to place `place`.
    fn capture(&mut self, word: usize, place: usize, stream: Stream) -> Result<()> {
        if place >= self.found.len() {
            return Err(Error::internal(format!("no place {place} for a mark")));
        }
        self.is_in_graphs = true;
        let _entered = self.context.enter()?;
        let to = self.places.0 + place * WORD;
        // SAFETY: the word and the place are inside their allocations, which are never freed from now on, as
        // graphs may be replayed at any time (`Drop`).
        check("cuMemcpyHtoDAsync", unsafe {
            let from = self.page.host().add(word);
            let copy = functions()?.cuMemcpyHtoDAsync_v2;
            copy(to as u64, from.cast(), WORD, raw_stream(stream))
        })
    }

    fn ask(&mut self) -> Result<()> {
        let DevPtr(from) = self.places;
        let bytes = self.found.len() * WORD;
        // SAFETY: the page has that many words behind the first ones; it is never freed from now on (`Drop`).
        check("cuMemcpyDtoHAsync", unsafe {
            let to = self.page.host().add(FOUND);
            let copy = functions()?.cuMemcpyDtoHAsync_v2;
            copy(to.cast(), from as u64, bytes, raw_stream(self.stream))
        })?;
        self.is_asked = true;
        Ok(())
    }
}

impl ReplayMarks for GraphMarks {
    fn begin(&mut self, place: usize, stream: Stream) -> Result<()> {
        self.capture(TICK, place, stream)
    }

    fn end(&mut self, place: usize, stream: Stream) -> Result<()> {
        self.capture(ZERO, place, stream)
    }

    fn look(&mut self) -> Result<Option<&[u32]>> {
        let _apart = ApartFromCaptures::enter()?;
        let context = Arc::clone(&self.context);
        let _entered = context.enter()?;
        let is_answered = self.is_asked;
        if is_answered {
            if !driver::is_idle(self.stream)? {
                return Ok(None);
            }
            for (index, found) in self.found.iter_mut().enumerate() {
                *found = self.page.read(FOUND + index).unwrap_or_default();
            }
        }
        // Zero is no tick.
        self.tick = self.tick.checked_add(1).unwrap_or(1);
        self.page.write(TICK, self.tick);
        self.ask()?;
        Ok(is_answered.then_some(&self.found))
    }
}

impl Drop for GraphMarks {
    fn drop(&mut self) {
        let Some(_entered) = self.context.enter_if_alive() else {
            return;
        };
        if self.is_in_graphs || self.is_asked {
            // Replays may go on, and a look may be under way: all stays.
            return;
        }
        let destroy = |raw| drop(driver::destroy_stream(Stream(raw)));
        self.context.destroy(self.stream.0, destroy);
        // SAFETY: dropped here only, and not used again; no copy uses it, as nothing was captured.
        unsafe { ManuallyDrop::drop(&mut self.page) };
        let free = |address| drop(driver::free(DevPtr(address)));
        let key = Key::Memory(self.found.len() * WORD);
        self.context.free_later(Some(key), self.places.0, free);
    }
}

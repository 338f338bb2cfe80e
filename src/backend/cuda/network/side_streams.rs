//! Streams of the library's own that follow callers' streams.
//!
//! Joining a capture makes a stream part of it until EndCapture, even if it was joined back before. So each open
//! capture has a stream of its own here, and work outside of graphs has one that no capture ever gets.

use crate::backend::cuda::driver::context_handle::ApartFromCaptures;
use crate::backend::cuda::driver::event::MOST_CAPTURES;
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::driver::stream::{Capture, is_captured};
use crate::backend::device::{Device, OwnStream};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use parking_lot::Mutex;
use std::sync::Arc;

/// One stream for work outside of graphs, and up to [`MOST_CAPTURES`] for captures.
pub struct SideStreams {
    device: Arc<dyn Device>,
    outside: OwnStream,
    /// With the capture that each had last.
    inside: Mutex<Vec<(Capture, OwnStream)>>,
}

impl SideStreams {
    /// The one outside of graphs; the others are made when a capture needs them.
    pub fn new(memory: &Arc<CudaMemory>) -> Result<Self> {
        let device: Arc<dyn Device> = memory.clone();
        Ok(Self { outside: OwnStream::new(Arc::clone(&device))?, inside: Mutex::default(), device })
    }

    /// The stream for work outside of graphs.
    pub fn outside(&self) -> Stream {
        self.outside.stream
    }

    /// The stream that may follow one with this capture. The calling thread is inside the context.
    pub fn of(&self, capture: Option<Capture>) -> Result<Stream> {
        let Some(capture) = capture else { return Ok(self.outside()) };
        let mut inside = self.inside.lock();
        if let Some((_, own)) = inside.iter().find(|(last, _)| *last == capture) {
            return Ok(own.stream);
        }
        for (last, free) in inside.iter_mut() {
            if !is_captured(free.stream)? {
                *last = capture;
                return Ok(free.stream);
            }
        }
        if inside.len() == MOST_CAPTURES {
            return Err(Error::usage(Subject::Stream, InSequence::CapturesInTurn { most: MOST_CAPTURES }));
        }
        let _apart = ApartFromCaptures::enter()?;
        let new = OwnStream::new(Arc::clone(&self.device))?;
        let stream = new.stream;
        inside.push((capture, new));
        Ok(stream)
    }
}

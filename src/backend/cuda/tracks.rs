//! Which staged operation uses which track of the LL kernels, and in what order its phases run.
//!
//! A track carries one staged operation at a time (`cuda/common/ll.cuh` says why banks are then safe).
//! Which one, `state::group` says, so that all ranks use the same.
//! The send phase runs after the last receive phase of its track, and the receive phase after its send
//! phase, whatever their streams.
#![forbid(unsafe_code)]

use crate::backend::cuda::context::{Context, Enqueued};
use crate::backend::cuda::event::Event;
use crate::backend::cuda::order::group_has_ended;
use crate::backend::cuda::streams::Place;
use crate::backend::quiet::{Graphs, Works};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tracks for staged operations; the kernels number them from 1.
pub(super) const STAGED_TRACKS: usize = 2;

/// Enqueues a receive phase that throws away what it receives.
pub(super) type Discard = Box<dyn Fn(&Place) -> Result<()> + Send>;

/// The staged tracks of a group.
pub(super) struct Tracks(Arc<Receivers>);

struct Receivers {
    tracks: Mutex<[Track; STAGED_TRACKS]>,
    closed: AtomicBool,
    /// Set under the lock of `tracks`: no receive phase follows.
    ended: AtomicBool,
}

struct Track {
    /// A send phase was enqueued, its receive phase was not.
    busy: bool,
    /// The receive phase of an operation that was given up, due before the track's next operation.
    abandoned: Option<Discard>,
    sent: Event,
    received: Event,
}

impl Tracks {
    /// Free tracks.
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let track = || {
            Ok(Track {
                busy: false,
                abandoned: None,
                sent: Event::new(context)?,
                received: Event::new(context)?,
            })
        };
        let receivers = Arc::new(Receivers {
            tracks: Mutex::new([track()?, track()?]),
            closed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        context.watch(&receivers);
        Ok(Self(receivers))
    }

    /// Enqueues a send phase on track `number` by `launch`.
    pub(super) fn send(
        &self,
        number: u32,
        at: &Place,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut tracks = self.0.tracks.lock();
        let track = find(&mut *tracks, number)?;
        if track.busy {
            return Err(Error::internal(format!("track {number} is in use")));
        }
        match &track.abandoned {
            None => {
                track.received.hold(at)?;
            }
            // A graph would throw away at each launch, and in memory that has another handle by then.
            Some(_) if at.is_captured() => {
                return Err(Error::usage(
                    Subject::Stream,
                    InSequence::NoCaptureWhileGivenUp,
                ));
            }
            Some(discard) => {
                track.sent.hold(at)?;
                discard(at)?;
                track.received.record(at)?;
                track.abandoned = None;
            }
        }
        launch()?;
        track.sent.record(at)?;
        track.busy = true;
        Ok(())
    }

    /// Enqueues the receive phase of the operation on track `number` by `launch`.
    pub(super) fn receive(
        &self,
        number: u32,
        at: &Place,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut tracks = self.0.tracks.lock();
        if self.0.ended.load(Ordering::Relaxed) {
            return Err(group_has_ended());
        }
        let track = find(&mut *tracks, number)?;
        track.sent.hold_or_refuse(at)?;
        launch()?;
        track.received.record(at)?;
        track.busy = false;
        Ok(())
    }

    /// Lets the stream go on only after the last receive phase of track `number`, and says whether it does:
    /// a graph does not wait for what is outside.
    pub(super) fn follow(&self, number: u32, at: &Place) -> Result<bool> {
        find(&mut *self.0.tracks.lock(), number)?.received.hold(at)
    }

    /// Frees track `number` without a receive phase; its next operation runs `discard` first.
    pub(super) fn abandon(&self, number: u32, discard: Discard) {
        let mut tracks = self.0.tracks.lock();
        if let Ok(track) = find(&mut *tracks, number) {
            track.busy = false;
            if !self.0.closed.load(Ordering::Relaxed) {
                track.abandoned = Some(discard);
            }
        }
    }

    /// No operation will follow: forgets what was given up, and with it the handles that it keeps.
    pub(super) fn close(&self) {
        self.0.closed.store(true, Ordering::Relaxed);
        let given_up: Vec<_> = {
            let mut tracks = self.0.tracks.lock();
            tracks.iter_mut().map(|it| it.abandoned.take()).collect()
        };
        drop(given_up);
    }
}

/// Send phases are in the group's order, too; receive phases here alone.
impl Works for Receivers {
    fn while_idle(&self, graphs: Graphs, then: &mut dyn FnMut()) {
        let graphs_count = graphs == Graphs::Count && !self.ended.load(Ordering::Relaxed);
        if let Some(tracks) = self.tracks.try_lock()
            && !(graphs_count && tracks.iter().any(|it| it.received.is_in_graphs()))
            && tracks.iter().all(|it| it.received.is_over() != Ok(false))
        {
            then();
        }
    }
}

impl Enqueued for Receivers {
    fn are_over(&self) -> Result<bool> {
        let tracks = self.tracks.lock();
        let over: Result<Vec<bool>> = tracks.iter().map(|it| it.received.is_over()).collect();
        Ok(!over?.contains(&false))
    }

    fn are_captured(&self) -> bool {
        let tracks = self.tracks.lock();
        tracks.iter().any(|it| it.received.is_in_graphs())
    }

    fn end(&self) {
        let _no_launch = self.tracks.lock();
        self.ended.store(true, Ordering::Relaxed);
    }
}

fn find(tracks: &mut [Track], number: u32) -> Result<&mut Track> {
    (number as usize)
        .checked_sub(1)
        .and_then(|index| tracks.get_mut(index))
        .ok_or_else(|| Error::internal(format!("no track {number}")))
}

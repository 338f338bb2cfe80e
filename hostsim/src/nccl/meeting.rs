//! Waiting for other ranks: barriers, and the detector for ranks that never come.
//!
//! A wait ends when the others arrive, when any rank reports a failure, when a missing rank turns out to be dead or to
//! have left the communicator, when this rank has left, or after `NCCLEP_HOSTSIM_HANG_SECONDS`. Calls that connect
//! ranks look for dead ones later if `NCCLEP_HOSTSIM_CONNECT_SECONDS` says so. If a rank was missing, the communicator
//! is marked failed and one line names it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::error::{Code, Failure, Outcome};
use super::segment::{self, Segment};
use crate::report;

/// Which of the two meetings of a communicator.
#[derive(Clone, Copy)]
pub(crate) enum Room {
    /// For work on streams.
    Stream = 0,
    /// For calls on the host.
    Host = 1,
}

/// One rank's wait for others, on behalf of an operation.
pub(crate) struct Watch<'a> {
    segment: &'a Segment,
    rank: usize,
    operation: &'static str,
    since: Instant,
    /// How long it waits before it looks for dead processes.
    patience: Duration,
}

/// How long to sleep before looking for dead processes.
const SLICE: Duration = Duration::from_millis(250);
const DEFAULT_LIMIT: Duration = Duration::from_secs(60);

/// Comes to a meeting and returns when all ranks have.
pub(crate) fn meet(segment: &Segment, rank: usize, room: Room, operation: &'static str) -> Outcome<()> {
    let room = room as usize;
    let meeting = &segment.header().meetings[room];
    let generation = meeting.generation.load(Ordering::Acquire);
    let step = segment.lane(rank).steps[room].fetch_add(1, Ordering::AcqRel).wrapping_add(1);
    if meeting.present.fetch_add(1, Ordering::AcqRel) as usize + 1 == segment.ranks() {
        // The last to arrive: nobody else touches `present` until the generation has changed.
        meeting.present.store(0, Ordering::Relaxed);
        meeting.generation.fetch_add(1, Ordering::Release);
        segment::wake_all(&meeting.generation);
        return Ok(());
    }
    let mut watch = Watch::start(segment, rank, operation);
    if room == Room::Host as usize {
        watch.patience = connecting().unwrap_or(SLICE);
    }
    let missing = || {
        (0..segment.ranks())
            .filter(|other| {
                let steps = segment.lane(*other).steps[room].load(Ordering::Acquire);
                step.wrapping_sub(steps) as i32 > 0
            })
            .collect()
    };
    while meeting.generation.load(Ordering::Acquire) == generation {
        watch.pause(&meeting.generation, generation, &missing)?;
    }
    Ok(())
}

impl<'a> Watch<'a> {
    pub(crate) fn start(segment: &'a Segment, rank: usize, operation: &'static str) -> Self {
        Self { segment, rank, operation, since: Instant::now(), patience: SLICE }
    }

    /// Restarts the clock, after progress.
    pub(crate) fn restart(&mut self) {
        self.since = Instant::now();
    }

    /// Sleeps for a while as long as the word has the value `seen`; fails once the wait cannot succeed any more.
    /// `missing` returns the ranks that it waits for.
    pub(crate) fn pause(&self, word: &AtomicU32, seen: u32, missing: &dyn Fn() -> Vec<usize>) -> Outcome<()> {
        if self.segment.has_left(self.rank) {
            let text = format!("rank {}: {} aborted", self.rank, self.operation);
            return Err(Failure::new(Code::RemoteError, text));
        }
        if let Some((code, reporter)) = self.segment.failure() {
            let text =
                format!("rank {}: {} given up, the communicator failed on rank {reporter}", self.rank, self.operation);
            return Err(Failure::new(code, text));
        }
        let waited = self.since.elapsed();
        let reason = if waited >= limit() {
            Some(format!("waited {:.1} s", waited.as_secs_f32()))
        } else {
            self.cannot_come(&missing(), waited >= self.patience)
        };
        match reason {
            // The missing rank may have done its part just before it went away.
            Some(_) if word.load(Ordering::Acquire) != seen => Ok(()),
            Some(reason) => Err(self.give_up(&reason, &missing())),
            None => {
                segment::wait(word, seen, SLICE.min(limit() - waited));
                Ok(())
            }
        }
    }

    /// Why one of the missing ranks will never come, if known. Looking for dead processes takes long.
    fn cannot_come(&self, missing: &[usize], look_for_dead: bool) -> Option<String> {
        for &other in missing {
            if self.segment.has_left(other) {
                return Some(format!("cannot end, rank {other} has left the communicator"));
            }
            if look_for_dead && self.is_dead(other) {
                return Some(format!("cannot end, the process of rank {other} has gone"));
            }
        }
        None
    }

    /// Marks the communicator failed; the first to do so reports why on stderr.
    fn give_up(&self, reason: &str, missing: &[usize]) -> Failure {
        let names: Vec<String> = missing.iter().map(usize::to_string).collect();
        let text = format!(
            "rank {}: {} {reason}; not arrived: rank {} of {}; the communicator is marked failed",
            self.rank,
            self.operation,
            names.join(", "),
            self.segment.ranks()
        );
        if self.segment.fail(Code::RemoteError, self.rank) {
            report::failure(&text);
        }
        Failure::new(Code::RemoteError, text)
    }

    fn is_dead(&self, other: usize) -> bool {
        let process = self.segment.lane(other).process.load(Ordering::Acquire);
        process != 0 && has_ended(process)
    }
}

/// Whether a process is gone, or a zombie that its parent has not reaped yet.
fn has_ended(process: u32) -> bool {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{process}/stat")) else { return true };
    // The state follows the command's name, which may itself contain spaces and parentheses.
    let state = text.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
    matches!(state, Some('Z' | 'X'))
}

/// Deadline of a wait.
fn limit() -> Duration {
    static LIMIT: OnceLock<Duration> = OnceLock::new();
    *LIMIT.get_or_init(|| parse_limit(std::env::var("NCCLEP_HOSTSIM_HANG_SECONDS").ok().as_deref()))
}

fn parse_limit(text: Option<&str>) -> Duration {
    parse_seconds(text).unwrap_or(DEFAULT_LIMIT)
}

/// How long a call that connects ranks tries to reach a dead one, as NCCL does, including in a communicator's first
/// operation. `None`: nothing connects there, and deaths show at once.
pub(crate) fn connecting() -> Option<Duration> {
    static CONNECTING: OnceLock<Option<Duration>> = OnceLock::new();
    *CONNECTING.get_or_init(|| parse_seconds(std::env::var("NCCLEP_HOSTSIM_CONNECT_SECONDS").ok().as_deref()))
}

fn parse_seconds(text: Option<&str>) -> Option<Duration> {
    text.and_then(|text| text.trim().parse().ok())
        .filter(|seconds| *seconds > 0.0)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nccl::unique_id::Rendezvous;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn limits_are_read_as_seconds() {
        assert_eq!(parse_limit(Some("0.5")), Duration::from_millis(500));
        for bad in [None, Some("0"), Some("-1"), Some("soon"), Some("inf"), Some("NaN")] {
            assert_eq!(parse_limit(bad), DEFAULT_LIMIT);
        }
    }

    #[test]
    fn dead_processes_are_told_from_living_ones() {
        assert!(!has_ended(std::process::id()));
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        let begin = Instant::now();
        while !has_ended(child.id()) {
            assert!(begin.elapsed() < Duration::from_secs(10), "a zombie counts as ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        child.wait().expect("an end");
        assert!(has_ended(child.id()));
    }

    #[test]
    fn nobody_leaves_before_all_have_come() {
        const RANKS: usize = 5;
        const ROUNDS: usize = 200;
        let rendezvous = Rendezvous::create().expect("memfd");
        let segment = Arc::new(Segment::map(rendezvous, RANKS).expect("mapping"));
        let arrivals = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for rank in 0..RANKS {
                let (segment, arrivals) = (Arc::clone(&segment), &arrivals);
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        arrivals.fetch_add(1, Ordering::SeqCst);
                        meet(&segment, rank, Room::Stream, "test").expect("a meeting");
                        assert!(arrivals.load(Ordering::SeqCst) >= round * RANKS);
                    }
                });
            }
        });
        rendezvous.release();
    }

    #[test]
    fn what_a_rank_did_before_it_left_counts_first() {
        let rendezvous = Rendezvous::create().expect("memfd");
        let segment = Segment::map(rendezvous, 2).expect("mapping");
        let watch = Watch::start(&segment, 0, "test");
        let bell = &segment.lane(0).bell;
        segment.ring(0);
        segment.leave(1);
        assert!(watch.pause(bell, 0, &|| vec![1]).is_ok(), "there is news");
        let failure = watch.pause(bell, 1, &|| vec![1]).expect_err("nothing more will come");
        assert!(failure.text.contains("rank 1 has left"), "{}", failure.text);
        assert_eq!(segment.failure(), Some((Code::RemoteError, 0)));
        rendezvous.release();
    }
}

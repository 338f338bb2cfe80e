//! The process's thread that watches all transports, as long as there are any.

use crate::backend::detached;
use crate::error::Result;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often it looks.
const PERIOD: Duration = Duration::from_millis(20);

/// Threads kept for ending a failed network, which takes two.
const SPARES: usize = 2;

/// Looks at something; false once nobody else holds it.
type Look = Box<dyn Fn(Instant) -> bool + Send>;

struct Watch {
    watched: Vec<Look>,
    is_running: bool,
}

static WATCH: Mutex<Watch> = Mutex::new(Watch { watched: Vec::new(), is_running: false });

/// Calls `look`, which must not wait, for as long as somebody else holds `watched`.
pub fn watch<W: Send + Sync + 'static>(watched: &Arc<W>, look: fn(&W, Instant)) -> Result<()> {
    let watched = Arc::downgrade(watched);
    let look_at_it = move |now| {
        let Some(watched) = watched.upgrade() else { return false };
        look(&watched, now);
        // What nobody else holds by now may free memory when dropped, and so synchronize the device.
        if let Some(last) = Arc::into_inner(watched) {
            drop(detached::start(move || drop(last)));
        }
        true
    };
    let mut watch = WATCH.lock();
    if !watch.is_running {
        detached::keep_spares(SPARES)?;
        detached::spawn("nccl-ep-watchdog", run).inspect_err(|_| drop(detached::keep_spares(0)))?;
        watch.is_running = true;
    }
    watch.watched.push(Box::new(look_at_it));
    Ok(())
}

fn run() {
    loop {
        let mut watched = std::mem::take(&mut WATCH.lock().watched);
        let now = Instant::now();
        watched.retain(|look| look(now));
        let mut watch = WATCH.lock();
        watch.watched.extend(watched);
        if watch.watched.is_empty() {
            watch.is_running = false;
            // Lowering the number starts no thread.
            let _ = detached::keep_spares(0);
            return;
        }
        drop(watch);
        std::thread::sleep(PERIOD);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_thread_looks_and_ends_and_comes_again() {
        for _ in 0..2 {
            let counted = Arc::new(AtomicUsize::new(0));
            let count = |counted: &AtomicUsize, _| {
                counted.fetch_add(1, Ordering::SeqCst);
            };
            watch(&counted, count).unwrap();
            while counted.load(Ordering::SeqCst) < 3 {
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(counted);
            while WATCH.lock().is_running {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

//! The process's thread that watches all transports, as long as there are any.

use crate::backend::detached;
use crate::error::{Error, Result};
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How often it looks.
const PERIOD: Duration = Duration::from_millis(20);

/// Threads kept for ending a failed network, which takes two.
const SPARES: usize = 2;

/// Something to watch.
pub trait Watched: Send + Sync {
    /// Looks without waiting.
    fn look(&self, now: Instant);
}

#[derive(Default)]
struct Watch {
    watched: Vec<Weak<dyn Watched>>,
    is_running: bool,
}

static WATCH: Lazy<Mutex<Watch>> = Lazy::new(Mutex::default);

/// Watches `watched` for as long as somebody else holds it.
pub fn watch(watched: &Arc<impl Watched + 'static>) -> Result<()> {
    let watched = Arc::downgrade(watched);
    let mut watch = WATCH.lock();
    if !watch.is_running {
        detached::keep_spares(SPARES)?;
        Builder::new()
            .name("nccl-ep-watchdog".to_owned())
            .spawn(run)
            .map_err(|cause| Error::system("a thread for the network", &cause))
            .inspect_err(|_| drop(detached::keep_spares(0)))?;
        watch.is_running = true;
    }
    watch.watched.push(watched);
    Ok(())
}

fn run() {
    while let Some(watched) = alive() {
        let now = Instant::now();
        watched.iter().for_each(|it| it.look(now));
        // Before the pause. What nobody else holds may free memory when dropped, and so synchronize the device.
        for it in watched.into_iter().filter(|it| Arc::strong_count(it) == 1) {
            drop(detached::start(move || drop(it)));
        }
        std::thread::sleep(PERIOD);
    }
}

/// What to watch; `None` if nothing is left, and the thread must exit.
fn alive() -> Option<Vec<Arc<dyn Watched>>> {
    let mut watch = WATCH.lock();
    watch.watched.retain(|it| it.strong_count() > 0);
    let alive: Vec<_> = watch.watched.iter().filter_map(Weak::upgrade).collect();
    watch.is_running = !alive.is_empty();
    if !watch.is_running {
        // Lowering the number starts no thread.
        let _ = detached::keep_spares(0);
    }
    watch.is_running.then_some(alive)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Watched for Counted {
        fn look(&self, _now: Instant) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn the_thread_looks_and_ends_and_comes_again() {
        for _ in 0..2 {
            let counted = Arc::new(Counted::default());
            watch(&counted).unwrap();
            while counted.0.load(Ordering::SeqCst) < 3 {
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(counted);
            while WATCH.lock().is_running {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

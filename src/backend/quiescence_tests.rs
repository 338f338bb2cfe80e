//! Unit tests of quiescent devices: what is freed when, and what is reused.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

struct Switch(AtomicBool);

impl Works for Switch {
    fn while_idle(&self, _graphs: Graphs, then: &mut dyn FnMut()) {
        if self.0.load(Ordering::Relaxed) {
            then();
        }
    }
}

/// Operations that were captured into graphs.
struct Captured;

impl Works for Captured {
    fn while_idle(&self, graphs: Graphs, then: &mut dyn FnMut()) {
        if graphs == Graphs::DoNotCount {
            then();
        }
    }
}

/// A device, and a record of what was freed on it.
fn device() -> (Arc<Quiescence>, Arc<AtomicUsize>) {
    (Arc::default(), Arc::default())
}

/// A caller's memory. Freeing it adds its address to `freed`, or ten times that if the free waits for nothing.
fn allocation(address: usize, bytes: usize, freed: &Arc<AtomicUsize>) -> Allocation {
    let count = Arc::clone(freed);
    Allocation {
        address,
        bytes,
        free: free(freed).unwrap(),
        free_unawaited: Box::new(move |address| {
            count.fetch_add(10 * address, Ordering::Relaxed);
            true
        }),
    }
}

fn free(freed: &Arc<AtomicUsize>) -> Option<Free> {
    let freed = Arc::clone(freed);
    Some(Box::new(move |address| {
        freed.fetch_add(address, Ordering::Relaxed);
    }))
}

#[test]
fn on_a_quiescent_device_nothing_waits() {
    let (quiescence, freed) = device();
    quiescence.later(Some(Key::Memory(1)), 7, free(&freed));
    assert_eq!(freed.load(Ordering::Relaxed), 7);
    assert_eq!(quiescence.take(&Key::Memory(1)), None);
}

#[test]
fn what_waits_is_freed_when_the_last_exchange_ends() {
    let (quiescence, freed) = device();
    let exchanges = [quiescence.begin(), quiescence.begin()];
    quiescence.later(Some(Key::Memory(1)), 7, free(&freed));
    let [first, second] = exchanges;
    drop(first);
    assert_eq!(freed.load(Ordering::Relaxed), 0);
    drop(second);
    assert_eq!(freed.load(Ordering::Relaxed), 7);
}

#[test]
fn operations_on_the_device_make_it_wait() {
    let (quiescence, freed) = device();
    let busy = Arc::new(Switch(AtomicBool::new(false)));
    let works: Weak<dyn Works> = Arc::downgrade(&busy) as Weak<dyn Works>;
    quiescence.watch(works);
    quiescence.later(None, 7, free(&freed));
    assert_eq!(quiescence.attempt(|| panic!("the device is not quiescent")), Attempt::Busy);
    busy.0.store(true, Ordering::Relaxed);
    drop(quiescence.begin());
    assert_eq!(freed.load(Ordering::Relaxed), 7);
    busy.0.store(false, Ordering::Relaxed);
    drop(busy);
    assert_eq!(quiescence.attempt(|| ()), Attempt::Done);
}

#[test]
fn while_graphs_are_alive_nothing_waits_for_the_device() {
    let (quiescence, freed) = device();
    let captured = Arc::new(Captured);
    quiescence.watch(Arc::downgrade(&captured) as Weak<dyn Works>);
    quiescence.later(Some(Key::Memory(1)), 7, free(&freed));
    let start = Instant::now();
    quiescence.free_soon(allocation(8, MOST_BYTES, &freed));
    assert!(start.elapsed() < PATIENCE, "graphs are not waited for");
    assert_eq!(quiescence.attempt(|| ()), Attempt::Busy);
    assert_eq!(freed.load(Ordering::Relaxed), 0);
    // The oldest is the surplus.
    quiescence.free_soon(allocation(9, 1, &freed));
    assert_eq!(freed.load(Ordering::Relaxed), 80);
    drop(captured);
    drop(quiescence.begin());
    assert_eq!(freed.load(Ordering::Relaxed), 80 + 7 + 9);
}

#[test]
fn what_the_device_cannot_free_without_waiting_waits() {
    let (quiescence, freed) = device();
    let captured = Arc::new(Captured);
    quiescence.watch(Arc::downgrade(&captured) as Weak<dyn Works>);
    let mut unable = allocation(8, 2 * MOST_BYTES, &freed);
    unable.free_unawaited = Box::new(|_| false);
    quiescence.free_soon(unable);
    assert_eq!(freed.load(Ordering::Relaxed), 0);
    drop(captured);
    drop(quiescence.begin());
    assert_eq!(freed.load(Ordering::Relaxed), 8);
}

#[test]
fn memory_of_the_callers_waits_for_operations_but_not_for_ever() {
    let (quiescence, freed) = device();
    let busy = Arc::new(Switch(AtomicBool::new(false)));
    quiescence.watch(Arc::downgrade(&busy) as Weak<dyn Works>);
    quiescence.free_soon(allocation(7, 1, &freed));
    assert_eq!(freed.load(Ordering::Relaxed), 0);
    busy.0.store(true, Ordering::Relaxed);
    quiescence.free_soon(allocation(8, 1, &freed));
    assert_eq!(freed.load(Ordering::Relaxed), 15);
    let exchange = quiescence.begin();
    quiescence.free_soon(allocation(1, 1, &freed));
    assert_eq!(freed.load(Ordering::Relaxed), 15);
    drop(exchange);
    assert_eq!(freed.load(Ordering::Relaxed), 16);
}

#[test]
fn what_waits_serves_the_same_use_again() {
    let (quiescence, freed) = device();
    let exchange = quiescence.begin();
    quiescence.later(Some(Key::Memory(1)), 7, free(&freed));
    quiescence.later(None, 8, free(&freed));
    let taken = Taken { address: 7, must_stay: false };
    assert_eq!(quiescence.take(&Key::Memory(2)), None);
    assert_eq!(quiescence.take(&Key::Memory(1)), Some(taken));
    assert_eq!(quiescence.take(&Key::Memory(1)), None);
    drop(exchange);
    assert_eq!(freed.load(Ordering::Relaxed), 8);
}

#[test]
fn what_a_peer_may_map_stays_and_serves_again() {
    let (quiescence, _) = device();
    quiescence.later(Some(Key::Memory(1)), 7, None);
    drop(quiescence.begin());
    assert_eq!(quiescence.take(&Key::Memory(1)), Some(Taken { address: 7, must_stay: true }));
}

#[test]
fn a_stuck_exchange_keeps_everything_until_it_is_over() {
    let (quiescence, freed) = device();
    let stuck = Arc::new(AtomicBool::new(true));
    let asked = Arc::clone(&stuck);
    quiescence.mark_hung(Box::new(move || asked.load(Ordering::Relaxed)));
    quiescence.later(None, 7, free(&freed));
    assert!(quiescence.is_hung());
    assert_eq!(freed.load(Ordering::Relaxed), 0);
    stuck.store(false, Ordering::Relaxed);
    assert!(!quiescence.is_hung());
    drop(quiescence.begin());
    assert_eq!(freed.load(Ordering::Relaxed), 7);
}

#[test]
fn freeing_may_drop_what_frees_in_turn() {
    struct Frees(Arc<Quiescence>);
    impl Drop for Frees {
        fn drop(&mut self) {
            self.0.later(None, 0, Some(Box::new(drop)));
        }
    }
    let (quiescence, _) = device();
    let inner = Frees(Arc::clone(&quiescence));
    let exchange = quiescence.begin();
    quiescence.later(
        Some(Key::Memory(1)),
        1,
        Some(Box::new(move |_| {
            let _held = &inner;
        })),
    );
    drop(exchange);
    let inner = Frees(Arc::clone(&quiescence));
    quiescence.mark_hung(Box::new(move || {
        let _held = &inner;
        false
    }));
    assert!(!quiescence.is_hung());
}

#[test]
fn only_the_first_of_many_allocations_waits_and_too_many_are_freed_all_the_same() {
    let (quiescence, freed) = device();
    let busy = Arc::new(Switch(AtomicBool::new(false)));
    quiescence.watch(Arc::downgrade(&busy) as Weak<dyn Works>);
    let start = Instant::now();
    for _ in 0..MOST_ALLOCATIONS {
        quiescence.free_soon(allocation(1, 1, &freed));
    }
    assert!(start.elapsed() < PATIENCE * 20);
    assert_eq!(freed.load(Ordering::Relaxed), 0);
    quiescence.free_soon(allocation(1, 1, &freed));
    assert_eq!(freed.load(Ordering::Relaxed), 10);
    busy.0.store(true, Ordering::Relaxed);
    drop(quiescence.begin());
    assert_eq!(freed.load(Ordering::Relaxed), 10 + MOST_ALLOCATIONS);
}

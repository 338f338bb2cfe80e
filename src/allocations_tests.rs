//! Counts how often each thread of the unit tests calls the allocator.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// How often the calling thread has allocated or freed memory.
pub fn so_far() -> usize {
    ALLOCATIONS.get()
}

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, with a count of calls per thread.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count() {
    // The count of a thread that is ending is gone already.
    let _ = ALLOCATIONS.try_with(|it| it.set(it.get() + 1));
}

// SAFETY: forwards every call to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, data: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(data, layout) }
    }

    unsafe fn realloc(&self, data: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(data, layout, bytes) }
    }
}

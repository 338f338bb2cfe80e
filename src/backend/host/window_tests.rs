//! Unit tests of windows: which files are opened, how long they may be, and which messages are refused.

use super::*;
use rustix::fs::SealFlags;
use std::time::Instant;

fn hello(to: &mut [u8]) -> Result<()> {
    to.copy_from_slice(b"hello");
    Ok(())
}

#[test]
fn a_long_message_is_read_as_a_short_one_is() {
    let window = Window::create(1).unwrap();
    for bytes in [0, 1, COPIED_BYTES, COPIED_BYTES + 1] {
        let message: Vec<u8> = (0..bytes).map(|at| at as u8 ^ bytes as u8).collect();
        let fill = |to: &mut [u8]| {
            to.copy_from_slice(&message);
            Ok(())
        };
        window.bank(1).write(bytes, fill).unwrap();
        window.bank(1).post(1, bytes);
        assert_eq!(window.bank(1).read().unwrap()[..], message);
    }
}

#[test]
fn what_is_written_to_a_mapping_has_memory_before() {
    let window = Window::create(1).unwrap();
    assert!(window.file.metadata().unwrap().blocks() > 0);
    for bytes in [ALLOCATED_BYTES + 1, COPIED_BYTES + 1, 3 * ALLOCATED_BYTES] {
        let has_memory = |_: &mut [u8]| {
            let blocks = window.file.metadata().unwrap().blocks();
            assert!(blocks * BLOCK_BYTES >= bytes as u64);
            Ok(())
        };
        window.bank(1).write(bytes, has_memory).unwrap();
    }
    assert_eq!(window.filled[1].load(Ordering::Relaxed), 3 * ALLOCATED_BYTES as u64);
    assert_eq!(window.filled[0].load(Ordering::Relaxed), 0);
    // A file that can be mapped, and is given no memory.
    let zeros = File::options().read(true).write(true).open("/dev/zero").unwrap();
    let window = Window { file: zeros, ..window };
    window.bank(1).write(3 * ALLOCATED_BYTES, |_| Ok(())).unwrap();
    let refused = window.bank(1).write(3 * ALLOCATED_BYTES + 1, |_| unreachable!("a message without memory"));
    let error = refused.err().unwrap();
    assert_eq!(error.code(), Code::SystemError);
    assert!(error.text().starts_with("memory for a message: "), "{error}");
}

#[test]
fn a_second_mapping_sees_what_the_first_posts() {
    let mine = Window::create(2).unwrap();
    let theirs = Window::open(mine.address(), 2).unwrap();
    mine.bank(3).write(5, hello).unwrap();
    assert_eq!(theirs.bank(3).posted(), 0);
    mine.bank(3).post(9, 5);
    assert_eq!(theirs.bank(3).posted(), 9);
    assert_eq!(&theirs.bank(3).read().unwrap()[..], b"hello");
    assert!(!mine.bank(3).is_read_by(1));
    theirs.bank(3).set_read(1, 9);
    assert!(mine.bank(3).is_read_by(1));
    assert!(!mine.bank(3).is_read_by(0));
}

/// Opens an anonymous file of this process as if a peer had named it.
fn open_as_window(name: &str, bytes: u64, seals: SealFlags) -> Result<Window> {
    let file = File::from(memfd_create(name, MemfdFlags::ALLOW_SEALING).unwrap());
    file.set_len(bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    open_descriptor(file.as_raw_fd())
}

fn open_descriptor(descriptor: i32) -> Result<Window> {
    Window::open(Address { process: std::process::id(), descriptor }, 2)
}

#[test]
fn only_windows_are_opened() {
    let whole = BANK_BYTES * PARTS;
    assert!(open_as_window("nccl_ep", whole, SEALS).is_ok());
    let foreign = [
        open_as_window("nccl_ep", whole, SealFlags::empty()),
        open_as_window("nccl_ep", whole, SealFlags::GROW),
        open_as_window("nccl_ep", 4096, SEALS),
        open_as_window("other", whole, SEALS),
        open_descriptor(std::fs::File::open("/dev/zero").unwrap().as_raw_fd()),
    ];
    for opened in foreign {
        let error = opened.err().unwrap();
        assert!(error.text().ends_with("is no window of a group"), "{error}");
    }
    assert!(open_descriptor(-1).is_err());
}

#[test]
fn a_window_cannot_be_cut_short() {
    assert!(Window::create(1).unwrap().file.set_len(4096).is_err());
}

#[test]
fn a_limit_makes_windows_smaller() {
    assert_eq!(bank_bytes(u64::MAX).unwrap(), BANK_BYTES);
    assert_eq!(bank_bytes(PARTS * BANK_BYTES).unwrap(), BANK_BYTES);
    let small = bank_bytes(1 << 20).unwrap();
    assert_eq!(small % ALIGNMENT, 0);
    assert!(small > 0 && small * PARTS <= 1 << 20);
    let refused = bank_bytes(4096).err().unwrap();
    assert_eq!(refused.code(), Code::SystemError);
    assert!(refused.text().ends_with("(got 4096 bytes, expected 327680 or more)"));
}

#[test]
fn the_length_of_a_message_is_not_believed() {
    let window = Window::create(1).unwrap();
    window.bank(0).write(5, hello).unwrap();
    for bytes in [1 << 30, 1 << 41, usize::MAX] {
        window.bank(0).post(1, bytes);
        assert!(window.bank(0).read().is_err(), "{bytes}");
    }
    window.bank(0).post(1, 5);
    assert_eq!(&window.bank(0).read().unwrap()[..], b"hello");
}

#[test]
fn failure_rings_the_bell() {
    let window = Window::create(1).unwrap();
    let rings = window.bell();
    window.set_failed();
    assert!(window.has_failed());
    assert_ne!(window.bell(), rings);
}

#[test]
fn a_ring_ends_the_sleep() {
    let window = Window::create(1).unwrap();
    let start = Instant::now();
    window.wait_for_bell(window.bell(), Duration::from_millis(20));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while window.bell() == 0 {
                window.wait_for_bell(0, Duration::from_secs(20));
            }
        });
        window.set_failed();
    });
    assert!(start.elapsed() < Duration::from_secs(10));
}

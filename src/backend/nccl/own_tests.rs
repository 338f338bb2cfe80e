//! Unit tests of the library's own communicators, over a fake NCCL that records calls.
#![allow(unsafe_code)]

use super::*;
use crate::backend::device::EnteredDevice;
use crate::backend::device::tests::TestDevice;
use crate::backend::nccl::{Functions, OwnFunctions};
use crate::error::refusal::{AmongRanks, Subject};
use crate::error::{Cause, Code};
use std::sync::atomic::AtomicI32;

/// Records a call as a letter, per thread, as each test has its own.
fn note(letter: char) -> c_int {
    CALLS.with_borrow_mut(|calls| calls.push(letter));
    0
}

fn calls() -> String {
    CALLS.take()
}

thread_local! {
    static CALLS: std::cell::RefCell<String> = std::cell::RefCell::default();
    static SEND: AtomicI32 = const { AtomicI32::new(0) };
}

unsafe extern "C" fn ask<const ANSWER: c_int>(_comm: *mut c_void, answer: *mut c_int) -> c_int {
    // SAFETY: callers give a place for a number.
    unsafe { *answer = ANSWER };
    0
}

unsafe extern "C" fn all_gather(
    _send: *const c_void,
    _receive: *mut c_void,
    _bytes: usize,
    _type: c_int,
    _comm: *mut c_void,
    _stream: *mut c_void,
) -> c_int {
    note('g')
}

unsafe extern "C" fn get_version<const VERSION: c_int>(version: *mut c_int) -> c_int {
    // SAFETY: callers give a place for a number.
    unsafe { *version = VERSION };
    0
}

unsafe extern "C" fn get_id(id: *mut UniqueId) -> c_int {
    // SAFETY: callers give a place for an id.
    unsafe { (*id).0[0] = 9 };
    0
}

unsafe extern "C" fn init(
    comm: *mut *mut c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> c_int {
    // SAFETY: callers give a configuration and a place for a handle.
    let config = unsafe {
        *comm = 0x1000 as *mut c_void;
        &*config
    };
    assert!(rank < ranks && id.0[0] == 9);
    assert_eq!((config.size, config.magic, config.version), (48, 0xcafe_beef, 21800));
    assert_eq!((config.blocking, config.split_share, config.cga_cluster_size), (1, 0, 0));
    assert_eq!((config.min_ctas, config.max_ctas), (c_int::MIN, 4));
    note('i')
}

unsafe extern "C" fn abort(_comm: *mut c_void) -> c_int {
    note('a')
}

unsafe extern "C" fn destroy(_comm: *mut c_void) -> c_int {
    note('d')
}

unsafe extern "C" fn group_start() -> c_int {
    note('(')
}

unsafe extern "C" fn group_end() -> c_int {
    note(')')
}

unsafe extern "C" fn send(
    _data: *const c_void,
    _bytes: usize,
    _type: c_int,
    _peer: c_int,
    _comm: *mut c_void,
    _stream: *mut c_void,
) -> c_int {
    note('s');
    SEND.with(|code| code.load(Ordering::Relaxed))
}

unsafe extern "C" fn receive(
    _data: *mut c_void,
    _bytes: usize,
    _type: c_int,
    _peer: c_int,
    _comm: *mut c_void,
    _stream: *mut c_void,
) -> c_int {
    note('r')
}

unsafe extern "C" fn broadcast(
    send: *const c_void,
    receive: *mut c_void,
    _bytes: usize,
    _type: c_int,
    root: c_int,
    _comm: *mut c_void,
    _stream: *mut c_void,
) -> c_int {
    assert_eq!(send, receive.cast_const());
    note(if root == 0 { '0' } else { '1' })
}

fn complete() -> (Functions, OwnFunctions) {
    let functions = Functions {
        ncclCommCount: ask::<0>,
        ncclCommUserRank: ask::<0>,
        ncclCommCuDevice: ask::<0>,
        ncclAllGather: all_gather,
        ncclGetErrorString: None,
        ncclGetVersion: Some(get_version::<22803>),
        ncclWinGetUserPtr: None,
    };
    let own = OwnFunctions {
        ncclGetUniqueId: get_id,
        ncclCommInitRankConfig: init,
        ncclCommGetAsyncError: ask::<0>,
        ncclCommAbort: abort,
        ncclCommDestroy: destroy,
        ncclGroupStart: group_start,
        ncclGroupEnd: group_end,
        ncclSend: send,
        ncclRecv: receive,
        ncclBroadcast: broadcast,
    };
    (functions, own)
}

/// Until the result is dropped, calls are recorded inside angle brackets.
fn enter_device() -> EnteredDevice {
    struct Entered;
    impl Drop for Entered {
        fn drop(&mut self) {
            note('>');
        }
    }
    note('<');
    EnteredDevice::new(Entered)
}

fn network(functions: Functions, own: std::result::Result<OwnFunctions, &'static str>) -> Result<Network> {
    Network::of(Box::leak(Box::new((functions, own))))
}

/// `comm` with another tag.
pub fn tagged(mut comm: OwnCommunicator, tag: u64) -> OwnCommunicator {
    comm.tag = tag;
    comm
}

/// Rank 2 of three; this thread may make `calls` calls without allocating.
pub fn third_of_three(calls: usize) -> OwnCommunicator {
    CALLS.with_borrow_mut(|it| it.reserve(calls));
    communicator(complete())
}

/// The same, with an asynchronous error.
pub fn third_with_an_error() -> OwnCommunicator {
    let (functions, own) = complete();
    communicator((functions, OwnFunctions { ncclCommGetAsyncError: ask::<6>, ..own }))
}

fn communicator(functions: (Functions, OwnFunctions)) -> OwnCommunicator {
    at((3, 2), functions)
}

/// A communicator at `place`, its rank and the number of ranks.
fn at(place: (usize, usize), (functions, own): (Functions, OwnFunctions)) -> OwnCommunicator {
    let network = network(functions, Ok(own)).unwrap();
    let id = network.new_id().unwrap();
    let device = TestDevice::entered_by(enter_device);
    OwnCommunicator::join(network, &id, place.0, CommRank::new(place.1), 4, Arc::new(device)).unwrap()
}

#[test]
fn an_nccl_that_lacks_a_function_is_refused() {
    let error = network(complete().0, Err("ncclRecv")).err().unwrap();
    let rule = AmongRanks::HasForNetwork { name: "ncclRecv" }.into();
    assert_eq!(error.report().cause, Cause::Refused(Subject::Nccl, rule));
    assert_eq!(error.code(), Code::InvalidUsage);
}

#[test]
fn an_old_nccl_is_refused_with_its_version() {
    let (mut functions, own) = complete();
    functions.ncclGetVersion = Some(get_version::<21805>);
    let error = network(functions, Ok(own)).err().unwrap();
    let rule = AmongRanks::NewEnoughForNetwork.into();
    assert_eq!(error.report().cause, Cause::Refused(Subject::Nccl, rule));
    assert!(error.text().contains("got 2.18.5, expected 2.19"), "{error}");
}

#[test]
fn messages_are_one_group_which_is_closed_after_an_error_too() {
    let comm = communicator(complete());
    let part = Part { peer: CommRank::new(1), data: DevPtr(16), bytes: 8 };
    comm.exchange(&[part, part], &[part], Stream::DEFAULT).unwrap();
    assert_eq!(calls(), "<i>(ssr)");
    SEND.with(|code| code.store(5, Ordering::Relaxed));
    assert_eq!(comm.exchange(&[part, part], &[part], Stream::DEFAULT).unwrap_err().code(), Code::InvalidUsage);
    assert_eq!(calls(), "(s)");
}

#[test]
fn two_ranks_exchange_large_messages_by_broadcasts_in_the_order_of_their_numbers() {
    let large = BROADCAST_BYTES;
    for (place, sent, received, expected) in [
        ((3, 2), [large].as_slice(), [large].as_slice(), "(sr)"),
        ((2, 1), &[large - 1, 8], &[8], "(ssr)"),
        ((2, 1), &[large, 8], &[8], "(011)"),
        ((2, 0), &[large, 8], &[8], "(001)"),
        ((2, 1), &[8, 8], &[large], "(011)"),
        ((2, 0), &[], &[large, large], "(11)"),
        ((2, 1), &[large], &[], "(1)"),
    ] {
        let comm = at(place, complete());
        let part = |&bytes: &usize| Part { peer: CommRank::new(1 - place.1 % 2), data: DevPtr(16), bytes };
        let parts = |all: &[usize]| -> Vec<Part> { all.iter().map(part).collect() };
        calls();
        comm.exchange(&parts(sent), &parts(received), Stream::DEFAULT).unwrap();
        assert_eq!(calls(), expected, "{place:?}, {sent:?}, {received:?}");
    }
}

#[test]
fn a_communicator_ends_once() {
    let comm = communicator(complete());
    comm.destroy();
    comm.abort(|| true);
    assert!(comm.exchange(&[], &[], Stream::DEFAULT).is_err());
    assert_eq!(comm.asynchronous_error(), None);
    drop(comm);
    assert_eq!(calls(), "<i><d>");
    drop(communicator(complete()));
    assert_eq!(calls(), "<i><(a)>");
}

#[test]
fn an_aborted_communicator_is_freed_when_it_may_be() {
    let comm = communicator(complete());
    comm.abort(|| {
        assert_eq!(calls(), "<i><(a");
        assert!(!comm.wait_for_end(Duration::ZERO));
        true
    });
    assert_eq!(calls(), ")>");
    assert!(comm.wait_for_end(Duration::ZERO));
    let comm = communicator(complete());
    comm.abort(|| false);
    assert_eq!(calls(), "<i><(a>");
    assert!(!comm.wait_for_end(Duration::ZERO));
}

#[test]
fn an_asynchronous_error_is_given_until_the_end() {
    let comm = third_with_an_error();
    assert_eq!(comm.asynchronous_error().unwrap().code(), Code::RemoteError);
    comm.abort(|| true);
    assert_eq!(comm.asynchronous_error(), None);
}

//! Unit tests of spare communicators. Each test has its own contexts, as all share the spares.

use super::*;
use crate::backend::device::tests::TestDevice;
use crate::backend::nccl::own::tests::{tagged, third_of_three, third_with_an_error};
use crate::backend::net::two_sided::replays::ReplayMarks;
use crate::backend::quiescence::Attempt;

const PLACE: (usize, CommRank) = (3, CommRank::new(2));

fn kept(device: &TestDevice, tag: u64) -> Arc<OwnCommunicator> {
    keep_tagged(third_of_three(0), device, tag)
}

fn keep_tagged(comm: OwnCommunicator, device: &TestDevice, tag: u64) -> Arc<OwnCommunicator> {
    let comm = Arc::new(tagged(comm, tag));
    let graphs = device.clone();
    comm.serve(Box::new(move || graphs.are_in_graphs()));
    keep(Ending::new(Arc::clone(&comm), Arc::new(device.clone())));
    comm
}

fn tags(offer: &Offer) -> Vec<u64> {
    offer.0.iter().map(|spare| spare.comm.tag).collect()
}

fn has_ended(comm: &OwnCommunicator) -> bool {
    comm.wait_for_end(Duration::ZERO)
}

#[test]
fn whoever_offers_some_has_them_alone_until_the_ranks_have_decided() {
    let device = TestDevice::of_context(101);
    let comms = [kept(&device, 7), kept(&device, 8)];
    let mut offer = Offer::new(&device, PLACE);
    assert_eq!(tags(&offer), [8, 7]);
    assert_eq!(tags(&Offer::new(&device, PLACE)).len(), 0);
    let taken = offer.take(7).unwrap();
    assert!(Arc::ptr_eq(&taken, &comms[0]));
    assert!(offer.take(7).is_none());
    drop(offer);
    assert_eq!(tags(&Offer::new(&device, PLACE)), [8]);
}

#[test]
fn an_offer_has_what_fits_alone() {
    let device = TestDevice::of_context(102);
    drop(kept(&device, 7));
    drop(keep_tagged(third_with_an_error(), &device, 8));
    assert_eq!(tags(&Offer::new(&device, (3, CommRank::new(1)))).len(), 0);
    assert_eq!(tags(&Offer::new(&device, (2, CommRank::new(2)))).len(), 0);
    assert_eq!(tags(&Offer::new(&TestDevice::of_context(103), PLACE)).len(), 0);
    assert_eq!(tags(&Offer::new(&device, PLACE)), [7]);
}

#[test]
fn the_oldest_that_can_ends_when_they_are_too_many() {
    let (device, graphs) = (TestDevice::of_context(104), TestDevice::default());
    graphs.make_graph();
    let asked = graphs.clone();
    let in_graph = kept(&device, 1);
    in_graph.serve(Box::new(move || asked.are_in_graphs()));
    let comms: Vec<_> = (0..MOST as u64).map(|tag| kept(&device, 2 + tag)).collect();
    let ended = || comms.iter().map(|comm| has_ended(comm)).collect::<Vec<_>>();
    assert!(!has_ended(&in_graph));
    assert_eq!(ended(), [true, false, false, false]);
    device.let_attempts_be(Attempt::Busy);
    drop(kept(&device, 9));
    assert_eq!(ended(), [true, false, false, false]);
    device.let_attempts_be(Attempt::Done);
    graphs.destroy_graph();
    drop(kept(&device, 10));
    assert!(has_ended(&in_graph));
    assert_eq!(ended(), [true, true, false, false]);
}

#[test]
fn ranks_decide_for_what_all_have() {
    let offer = |tags: [u64; MOST]| tags.map(u64::to_le_bytes).concat();
    let in_common = |offers: &[[u64; MOST]]| {
        let offers: Vec<_> = offers.iter().map(|&tags| offer(tags)).collect();
        in_common(&offers.iter().map(Vec::as_slice).collect::<Vec<_>>())
    };
    assert_eq!(in_common(&[[5, 3, 9, 0], [9, 3, 0, 0], [3, 9, 8, 7]]), Some(3));
    assert_eq!(in_common(&[[5, 3, 0, 0], [3, 0, 0, 0], [5, 0, 0, 0]]), None);
    assert_eq!(in_common(&[[0; MOST], [0; MOST]]), None);
    assert_eq!(in_common(&[]), None);
}

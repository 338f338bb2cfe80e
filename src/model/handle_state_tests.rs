use super::*;
use crate::model::ids::GroupRank;
use crate::model::ops::Zones;

fn form(keeps_ids: bool) -> HandleForm {
    HandleForm { keeps_ids, ..HandleForm::default() }
}

fn facts(algorithm: Algorithm, max_tokens: Option<usize>) -> GroupFacts {
    GroupFacts { algorithm, ranks: 8, rank: GroupRank::new(3), experts: 256, max_tokens, ..GroupFacts::SAMPLE }
}

#[test]
fn sections_follow_the_header_without_overlap() {
    let facts = facts(Algorithm::HighThroughput, Some(8192));
    let shape = StateShape::of_group(&facts, 8, HandleForm::default()).unwrap();
    let ht = HtSections::new(shape);
    let begins = [ht.begins, ht.departures, ht.counts, ht.entries, ht.bytes];
    assert_eq!(begins, [256, 512, 768, 1024, 1024 + 8192 * 8 * 8]);
    let ll = LlSections::new(StateShape { most_tokens: 3, ..shape }, 2);
    assert_eq!([ll.expert_of, ll.row_of, ll.tokens_of, ll.bytes], [256, 256 + 256, 512 + 768, 1280 + 256]);
}

#[test]
fn a_group_without_a_bound_has_no_size_of_blocks() {
    for algorithm in Algorithm::ALL {
        assert_eq!(block_bytes(&facts(algorithm, None), 8, HandleForm::default()), None);
    }
    let facts = facts(Algorithm::HighThroughput, Some(8192));
    let size = |keeps_ids| block_bytes(&facts, 8, form(keeps_ids));
    assert_eq!(size(false), Some(1024 + (512 << 10)));
    assert_eq!(size(true), Some(1024 + (1024 << 10)));
}

#[test]
fn kept_ids_are_all_of_one_width() {
    let of = |width, keeps_ids| {
        let routing = Routing { ids: DevPtr(64), width, tokens: 5, top_k: 8, form: form(keeps_ids) };
        header(&facts(Algorithm::HighThroughput, Some(16)), &routing, 0)
    };
    let (narrow, wide) = (IntWidth::Bits32, IntWidth::Bits64);
    assert_eq!(of(narrow, true), of(wide, true));
    assert_ne!(of(wide, true), of(wide, false));
}

#[test]
fn headers_differ_where_blocks_do() {
    let routing =
        Routing { ids: DevPtr(64), width: IntWidth::Bits64, tokens: 5, top_k: 8, form: HandleForm::default() };
    let facts = facts(Algorithm::HighThroughput, Some(16));
    let of = |facts: &GroupFacts, routing: &Routing| {
        let all = header(facts, routing, 7 << 32 | 9);
        assert_eq!(&all[COMPARED_WORDS..HASH_WORD], [9, 7, 0]);
        assert_eq!(all[HASH_WORD], header(facts, routing, 1)[HASH_WORD]);
        all[HASH_WORD]
    };
    let mut seen = vec![of(&facts, &routing)];
    let others = [
        GroupFacts { algorithm: Algorithm::LowLatency, ..facts },
        GroupFacts { ranks: 4, ..facts },
        GroupFacts { rank: GroupRank::new(4), ..facts },
        GroupFacts { experts: 128, ..facts },
        GroupFacts { max_tokens: Some(17), ..facts },
    ];
    seen.extend(others.iter().map(|facts| of(facts, &routing)));
    seen.push(of(&facts, &Routing { tokens: 4, ..routing }));
    seen.push(of(&facts, &Routing { top_k: 7, ..routing }));
    seen.push(with_layout(header(&facts, &routing, 0), Layout::RankMajor { ranks: 8, slots: 16 })[HASH_WORD]);
    for (index, hash) in seen.iter().enumerate() {
        assert!(!seen[..index].contains(hash), "{index}");
    }
    // The block does not depend on where the ids were.
    let elsewhere = Routing { ids: DevPtr(128), ..routing };
    assert_eq!(of(&facts, &elsewhere), of(&facts, &routing));
}

#[test]
fn words_are_shown_as_callers_know_them() {
    let zones = |alignment| Some(Zones { alignment, most_slots: None });
    let shown_of = |width, form| {
        let routing = Routing { ids: DevPtr(64), width, tokens: 5, top_k: 8, form };
        let header = header(&facts(Algorithm::HighThroughput, Some(16)), &routing, 0);
        shown(10, header[10])
    };
    assert_eq!(shown_of(IntWidth::Bits32, form(false)), "ids of 32 bits");
    let kept = "kept ids of 64 bits";
    assert_eq!(shown_of(IntWidth::Bits32, form(true)), kept);
    for alignment in [1, 128] {
        let form = HandleForm { zones: zones(alignment), ..form(true) };
        assert_eq!(shown_of(IntWidth::Bits32, form), format!("{kept} in zones aligned to {alignment}"));
    }
    assert_eq!([shown(8, 4), shown(3, 2), shown(0, 0)], ["tokens 4", "layout rank-major", "word 0 0x0"]);
}

//! The routing of an HT handle: which rank sends which token where. Computed once per handle from all ranks' ids.
#![allow(unsafe_code)]

use crate::backend::host::block::Block;
use crate::backend::host::numeric;
use crate::error::{Code, Error, Result};
use crate::model::group::GroupFacts;
use crate::model::handle_state::{CallerBlock, HtSections, NUMBER_WORD, ROWS_WORD, StateShape, header};
use crate::model::ops::{HandleForm, Routing, Zones};
use crate::model::room::Room;
use std::ops::Range;

/// A rank that hosts one of a token's experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    pub rank: usize,
    /// The token's row there, among those from the token's rank.
    pub index: usize,
    /// Its experts there: local ids, ascending, without repetition.
    pub experts: Vec<usize>,
}

/// The routing of one handle, as one rank sees it: the sections of its block (`model::handle_state`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HtMap {
    /// Number of the operation that exchanged the ids, the same on all ranks.
    pub number: u64,
    /// This rank's first row from each source, then the number of rows.
    pub begins: Vec<u32>,
    /// Rows that go from this rank to each.
    departures: Vec<u32>,
    /// Received rows per local expert.
    pub counts: Vec<u32>,
    /// `[tokens][top_k]` pairs of expert and index.
    pub entries: Vec<u8>,
    /// i64 `[tokens][top_k]`: this rank's ids, if the handle keeps them.
    pub ids: Vec<u8>,
    /// The slots of rows that lie by expert.
    pub zones: ZoneMap,
    /// Received rows that are dropped; not in the block.
    pub dropped: usize,
}

/// Bytes of an expert and an index.
pub const ENTRY_BYTES: usize = 8;

/// The ids of one rank.
pub struct RankIds {
    /// int64 `[tokens, top_k]`.
    pub ids: Vec<u8>,
    pub top_k: usize,
}

pub const ID_BYTES: usize = size_of::<i64>();

impl RankIds {
    /// A copy of `ids`; an error if memory is short.
    pub fn copied(ids: &[u8], top_k: usize) -> Result<Self> {
        let mut own = Vec::new();
        if own.try_reserve_exact(ids.len()).is_err() {
            return Err(Error::new(Code::SystemError, format!("no host memory for {} bytes of ids", ids.len())));
        }
        own.extend_from_slice(ids);
        Ok(Self { ids: own, top_k })
    }

    /// The ids of each token, if tokens have any.
    fn by_token(&self) -> impl Iterator<Item = &[u8]> {
        self.ids.chunks(self.top_k.max(1) * ID_BYTES)
    }
}

impl HtMap {
    /// Computes the map of `facts.rank` from the ids of all ranks, exchanged in operation `number`.
    pub fn new(facts: &GroupFacts, number: u64, all: &[RankIds], form: HandleForm) -> Self {
        let me = facts.rank.index();
        if let Some(most) = form.most_rows {
            let (kept, dropped) = cut(facts, all, most);
            let form = HandleForm { most_rows: None, ..form };
            return Self { dropped, ..Self::new(facts, number, &kept, form) };
        }
        let mut map = Self {
            number,
            begins: vec![0],
            departures: vec![0; facts.ranks],
            counts: vec![0; facts.local_experts()],
            entries: Vec::new(),
            ids: match all.get(me) {
                Some(own) if form.keeps_ids => own.ids.clone(),
                _ => Vec::new(),
            },
            zones: ZoneMap::default(),
            dropped: 0,
        };
        let mut received = Vec::new();
        let mut rows = 0;
        for (source, of_source) in all.iter().enumerate() {
            for ids in of_source.by_token() {
                let ranks = by_rank(facts, ids);
                if let Some(Destination { experts, .. }) = ranks.iter().find(|it| it.rank == me) {
                    rows += 1;
                    for expert in experts {
                        if let Some(count) = map.counts.get_mut(*expert) {
                            *count += 1;
                        }
                    }
                    received.push(experts.clone());
                }
                if source == me {
                    map.push(facts, &ranks, of_source.top_k);
                }
            }
            map.begins.push(rows);
        }
        if let Some(zones) = form.zones {
            let most = all.first().map_or(0, |ids| ids.top_k).min(facts.local_experts());
            map.zones = ZoneMap::new(zones, &map.counts, &received, most);
        }
        map
    }

    /// Appends the entries of this rank's next token, which goes to `ranks`.
    fn push(&mut self, facts: &GroupFacts, ranks: &[Destination], top_k: usize) {
        let mut entries = Vec::new();
        for Destination { rank, experts, .. } in ranks {
            let Some(index) = self.departures.get_mut(*rank) else { continue };
            let first = rank * facts.local_experts();
            entries.extend(experts.iter().map(|expert| [(first + expert) as u32, *index]));
            *index += 1;
        }
        entries.resize(top_k, [u32::MAX, 0]);
        let words = entries.iter().flatten();
        (self.entries).extend(words.flat_map(|word| word.to_ne_bytes()));
    }

    pub fn received(&self) -> usize {
        self.begins.last().map_or(0, |rows| *rows as usize)
    }

    /// Stores the map in the block of a handle with this routing.
    pub fn store(&self, facts: &GroupFacts, routing: &Routing, block: CallerBlock) -> Result<()> {
        let sections = sections(facts, routing)?;
        // SAFETY: `rule` has compared the block with the sections; the caller leaves it to the handle's operations.
        let mut block = unsafe { Block::new(block, sections.bytes) };
        let mut set = |offset, words: &[u32]| block.set(offset, words.iter().flat_map(|word| word.to_ne_bytes()));
        set(sections.begins, &self.begins)?;
        set(sections.departures, &self.departures)?;
        set(sections.counts, &self.counts)?;
        set(sections.slots, &self.zones.slots)?;
        set(sections.zones, &self.zones.begins)?;
        block.set(sections.entries, self.entries.iter().copied())?;
        block.set(sections.ids, self.ids.iter().copied())?;
        let mut header = header(facts, routing, self.number);
        if let Some(rows) = header.get_mut(ROWS_WORD) {
            *rows = self.received() as u32;
        }
        block.set_header(&header)
    }

    /// The map in a block, if it belongs to a handle with this routing.
    pub fn load(facts: &GroupFacts, routing: &Routing, block: CallerBlock) -> Result<Self> {
        let sections = sections(facts, routing)?;
        // SAFETY: as above.
        let block = unsafe { Block::new(block, sections.bytes) };
        let header = block.header(&header(facts, routing, 0))?;
        let words = |offset, count: usize| {
            Ok::<_, Error>(numeric::u32s(block.section(offset, count * size_of::<u32>())?).collect())
        };
        let number = header.iter().skip(NUMBER_WORD).take(2).rev();
        let entries = routing.tokens * routing.top_k;
        let ids = if routing.form.keeps_ids { entries } else { 0 };
        let begins: Vec<u32> = words(sections.begins, facts.ranks + 1)?;
        let rows = begins.last().map_or(0, |rows| *rows as usize);
        let zones = match routing.form.zones {
            None => ZoneMap::default(),
            Some(_) => {
                let most = routing.top_k.min(facts.local_experts());
                ZoneMap {
                    most,
                    slots: words(sections.slots, rows * most)?,
                    begins: words(sections.zones, facts.local_experts() + 1)?,
                }
            }
        };
        Ok(Self {
            number: number.fold(0, |high, word| high << u32::BITS | u64::from(*word)),
            begins,
            departures: words(sections.departures, facts.ranks)?,
            counts: words(sections.counts, facts.local_experts())?,
            dropped: 0,
            entries: block.section(sections.entries, entries * ENTRY_BYTES)?.to_vec(),
            ids: block.section(sections.ids, ids * ID_BYTES)?.to_vec(),
            zones,
        })
    }
}

fn sections(facts: &GroupFacts, routing: &Routing) -> Result<HtSections> {
    let shape = StateShape::of_group(facts, routing.top_k, routing.form);
    Ok(HtSections::new(shape.ok_or_else(|| Error::internal("a block in a group without a bound"))?))
}

/// All ranks' ids without those of rows beyond the first `most` of a rank; and how many such rows this rank has.
fn cut(facts: &GroupFacts, all: &[RankIds], most: usize) -> (Vec<RankIds>, usize) {
    let mut room = Room::new(vec![most as i64; facts.ranks], facts.local_experts());
    let kept = all.iter().map(|of_source| {
        let mut ids = Vec::new();
        for of_token in of_source.by_token() {
            let mut of_token: Vec<i64> = numeric::i64s(of_token).collect();
            room.take(&mut of_token);
            ids.extend(of_token.iter().flat_map(|id| id.to_ne_bytes()));
        }
        RankIds { ids, top_k: of_source.top_k }
    });
    let kept = kept.collect();
    (kept, room.dropped(facts.rank.index()))
}

/// The destinations of a token with these `entries`, by ascending rank.
pub fn destinations(facts: &GroupFacts, entries: &[u8]) -> Vec<Destination> {
    let mut all: Vec<Destination> = Vec::new();
    for entry in entries.as_chunks::<ENTRY_BYTES>().0 {
        let mut words = numeric::u32s(entry);
        let (Some(expert), Some(index)) = (words.next(), words.next()) else { continue };
        let Some(expert) = facts.expert(i64::from(expert.cast_signed())) else { continue };
        let (rank, local) = (facts.owner(expert), expert % facts.local_experts());
        add(&mut all, rank, local, index as usize);
    }
    all
}

/// Adds the `local` expert of `rank`; if it is the token's first there, the row gets number `index`.
fn add(all: &mut Vec<Destination>, rank: usize, local: usize, index: usize) {
    match all.last_mut() {
        Some(last) if last.rank == rank => last.experts.push(local),
        _ => all.push(Destination { rank, index, experts: vec![local] }),
    }
}

/// The ranks that host the experts in `ids` (int64), ascending; without row numbers yet.
fn by_rank(facts: &GroupFacts, ids: &[u8]) -> Vec<Destination> {
    let mut experts: Vec<usize> = numeric::i64s(ids).filter_map(|id| facts.expert(id)).collect();
    experts.sort_unstable();
    experts.dedup();
    let mut ranks = Vec::new();
    for expert in experts {
        add(&mut ranks, facts.owner(expert), expert % facts.local_experts(), 0);
    }
    ranks
}

/// Ends a row's list of slots.
const NO_SLOT: u32 = u32::MAX;
/// Stands for a slot beyond the limit.
const DROPPED: u32 = u32::MAX - 1;

/// The slots of all rows; empty unless they lie by expert.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZoneMap {
    /// Most slots of a row.
    pub most: usize,
    /// `[rows][most]`: the slots of each row, by ascending expert.
    pub slots: Vec<u32>,
    /// The first slot of each local expert, then the number of all slots.
    pub begins: Vec<u32>,
}

impl ZoneMap {
    /// The slots of `rows`, each given by its local experts; `counts` has the number of rows per expert.
    pub fn new(zones: Zones, counts: &[u32], rows: &[Vec<usize>], most: usize) -> Self {
        let mut begins = vec![0];
        let mut end = 0;
        for count in counts {
            end += zones.padded(*count as usize) as u32;
            begins.push(end);
        }
        let limit = zones.most_slots.map_or(DROPPED, |slots| slots as u32);
        let mut next = begins.clone();
        let mut slots = Vec::new();
        for experts in rows {
            let first = slots.len();
            for expert in experts {
                let Some(next) = next.get_mut(*expert) else { continue };
                slots.push(if *next < limit { *next } else { DROPPED });
                *next += 1;
            }
            slots.resize(first + most, NO_SLOT);
        }
        Self { most, slots, begins }
    }

    /// The slot of `row` for each of its experts; none if dropped.
    pub fn of_row(&self, row: usize) -> impl Iterator<Item = Option<usize>> {
        let slots = self.slots.get(row * self.most..(row + 1) * self.most).unwrap_or_default().iter();
        slots.take_while(|slot| **slot != NO_SLOT).map(|slot| (*slot != DROPPED).then_some(*slot as usize))
    }

    /// The number of all slots, including those beyond the limit.
    pub fn total(&self) -> usize {
        self.begins.last().map_or(0, |slots| *slots as usize)
    }

    /// The slots of each expert's zone, of which there are `most` in total.
    pub fn zones(&self, most: usize) -> impl Iterator<Item = Range<usize>> {
        let at = move |slot: u32| (slot as usize).min(most);
        self.begins.iter().zip(self.begins.iter().skip(1)).map(move |(begin, end)| at(*begin)..at(*end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::group::Algorithm;
    use crate::model::handle_state::block_bytes;
    use crate::model::ids::GroupRank;
    use crate::model::ops::{IntWidth, Zones};
    use crate::model::tensor::DevPtr;

    fn ids(ids: &[i64]) -> RankIds {
        RankIds { ids: ids.iter().flat_map(|id| id.to_ne_bytes()).collect(), top_k: 2 }
    }

    #[test]
    fn a_map_comes_back_from_moved_bytes_and_from_no_others() {
        let facts = GroupFacts {
            algorithm: Algorithm::HighThroughput,
            rank: GroupRank::new(1),
            experts: 4,
            max_tokens: Some(3),
            ..GroupFacts::SAMPLE
        };
        let zones = Some(Zones { alignment: 2, most_slots: None });
        let routing = |tokens| Routing {
            ids: DevPtr::default(),
            width: IntWidth::Bits64,
            tokens,
            top_k: 2,
            form: HandleForm { keeps_ids: true, zones, most_rows: None },
        };
        let form = routing(1).form;
        let map = HtMap::new(&facts, 5 << 32 | 6, &[ids(&[3, 2, -1, 0]), ids(&[2, 9])], form);
        assert_eq!(map.ids, [2_i64, 9].map(i64::to_ne_bytes).concat());
        let at = |block: &mut Vec<u64>| CallerBlock(DevPtr(block.as_mut_ptr() as usize));
        let mut first = vec![!0; block_bytes(&facts, 2, form).unwrap() / 8];
        let found = HtMap::load(&facts, &routing(1), at(&mut first)).unwrap_err();
        assert!(found.text().contains("holds no routing"), "{}", found.text());
        map.store(&facts, &routing(1), at(&mut first)).unwrap();
        let mut second = first.clone();
        first.fill(!0);
        assert_eq!(HtMap::load(&facts, &routing(1), at(&mut second)), Ok(map));
        assert!(HtMap::load(&facts, &routing(2), at(&mut second)).is_err());
    }
}

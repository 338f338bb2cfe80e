//! Where the rows that a rank receives lie by expert (`model::ops::Zones`).

use crate::model::ops::Zones;
use std::ops::Range;

/// Behind the last slot of a row.
const NO_SLOT: u32 = u32::MAX;
/// Instead of a slot that there is not.
const DROPPED: u32 = u32::MAX - 1;

/// The slots of all rows; empty where rows do not lie so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZoneMap {
    /// Most slots of a row.
    pub most: usize,
    /// `[rows][most]`: the slots of each row, by ascending expert.
    pub slots: Vec<u32>,
    /// The first slot of each local expert, then the number of all.
    pub begins: Vec<u32>,
}

impl ZoneMap {
    /// Of rows for these local experts each, in their order; `counts` says how many come for each expert.
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

    /// The slot of `row` for each of its experts; none for one that is dropped.
    pub fn of_row(&self, row: usize) -> impl Iterator<Item = Option<usize>> {
        let slots = self.slots.get(row * self.most..(row + 1) * self.most).unwrap_or_default().iter();
        slots.take_while(|slot| **slot != NO_SLOT).map(|slot| (*slot != DROPPED).then_some(*slot as usize))
    }

    /// All slots, also those that there are not.
    pub fn total(&self) -> usize {
        self.begins.last().map_or(0, |slots| *slots as usize)
    }

    /// The slots of the zone of each expert, of which there are `most`.
    pub fn zones(&self, most: usize) -> impl Iterator<Item = Range<usize>> {
        let at = move |slot: u32| (slot as usize).min(most);
        self.begins.iter().zip(self.begins.iter().skip(1)).map(move |(begin, end)| at(*begin)..at(*end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(most_slots: Option<usize>) -> ZoneMap {
        ZoneMap::new(Zones { alignment: 4, most_slots }, &[2, 3], &[vec![0, 1], vec![1], vec![1], vec![0]], 2)
    }

    #[test]
    fn rows_lie_by_expert_in_their_order() {
        let map = map(None);
        assert_eq!((&map.begins[..], map.total()), (&[0, 4, 8][..], 8));
        let slots: Vec<Vec<_>> = (0..4).map(|row| map.of_row(row).flatten().collect()).collect();
        assert_eq!(slots, [vec![0, 4], vec![5], vec![6], vec![1]]);
    }

    #[test]
    fn what_comes_beyond_the_bound_is_dropped() {
        let map = map(Some(6));
        let of = |row| map.of_row(row).collect::<Vec<_>>();
        assert_eq!(of(0), [Some(0), Some(4)]);
        assert_eq!((of(1), of(2)), (vec![Some(5)], vec![None]));
        assert_eq!(map.total(), 8);
        assert_eq!(map.zones(6).collect::<Vec<_>>(), [0..4, 4..6]);
    }
}

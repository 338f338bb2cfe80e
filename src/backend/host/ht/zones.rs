//! The slots of received rows that lie by expert (`model::ops::Zones`).

use crate::model::ops::Zones;
use std::ops::Range;

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

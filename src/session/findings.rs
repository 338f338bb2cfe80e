//! Collects a rank's unusual ids and weights: how many there are, and the first of each kind.

use std::fmt::{self, Display, Formatter};

/// One kind of unusual entries.
#[derive(Debug, Default, PartialEq)]
struct Kind {
    count: usize,
    first: Option<Entry>,
}

/// An entry and its id.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    token: usize,
    k: usize,
    id: i64,
}

impl Kind {
    fn note(&mut self, entry: Entry) {
        self.count += 1;
        self.first.get_or_insert(entry);
    }
}

#[derive(Debug, Default, PartialEq)]
pub(super) struct Findings {
    experts: usize,
    /// Ids that are neither an expert nor -1.
    foreign: Kind,
    /// Experts that a token names repeatedly.
    repeated: Kind,
    /// Entries with an expert whose weight is NaN.
    nan: Kind,
}

impl Findings {
    /// No findings yet, in a group with `experts`.
    pub(super) fn new(experts: usize) -> Self {
        Self { experts, ..Self::default() }
    }

    /// Adds the unusual ones of int64 `ids` `[.., top_k]`.
    pub(super) fn add_ids(&mut self, ids: &[u8], top_k: usize) {
        for (token, ids) in int64s(ids).chunks(top_k.max(1)).enumerate() {
            for (k, &id) in ids.iter().enumerate() {
                let entry = Entry { token, k, id };
                if !self.is_expert(id) && id != -1 {
                    self.foreign.note(entry);
                }
                if self.is_expert(id) && ids.iter().take(k).any(|&before| before == id) {
                    self.repeated.note(entry);
                }
            }
        }
    }

    /// Adds the unusual ones of the ids' float32 weights.
    pub(super) fn add_weights(&mut self, (ids, weights): (&[u8], &[u8]), top_k: usize) {
        let weights = weights.as_chunks().0.iter();
        for (entry, (id, weight)) in int64s(ids).into_iter().zip(weights).enumerate() {
            if self.is_expert(id) && f32::from_ne_bytes(*weight).is_nan() {
                let (token, k) = (entry / top_k.max(1), entry % top_k.max(1));
                self.nan.note(Entry { token, k, id });
            }
        }
    }

    fn is_expert(&self, id: i64) -> bool {
        usize::try_from(id).is_ok_and(|id| id < self.experts)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.foreign.count + self.repeated.count + self.nan.count == 0
    }
}

fn int64s(bytes: &[u8]) -> Vec<i64> {
    bytes.as_chunks().0.iter().map(|bytes| i64::from_ne_bytes(*bytes)).collect()
}

impl Display for Findings {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        let last = self.experts.saturating_sub(1);
        let mut gap = "";
        for (kind, what) in [
            (&self.foreign, format!("ids outside -1 to {last}")),
            (&self.repeated, "ids repeated within a token".to_owned()),
            (&self.nan, "NaN weights".to_owned()),
        ] {
            let Some(Entry { token, k, id }) = kind.first else { continue };
            let count = kind.count;
            to.write_str(gap)?;
            write!(to, "{what}: {count} (first: token {token}, k {k}, id {id})")?;
            gap = "; ";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(ids: &[i64]) -> Vec<u8> {
        ids.iter().flat_map(|id| id.to_ne_bytes()).collect()
    }

    #[test]
    fn ids_are_counted_by_kind_and_the_first_is_named() {
        let found = |ids: &[i64], top_k| {
            let mut found = Findings::new(4);
            found.add_ids(&bytes_of(ids), top_k);
            found
        };
        assert_eq!(
            found(&[0, 3, -1, -1, 3, 3, 4, -2, 1, 1, 1, 9], 4).to_string(),
            "ids outside -1 to 3: 3 (first: token 1, k 2, id 4); \
             ids repeated within a token: 3 (first: token 1, k 1, id 3)"
        );
        assert!(found(&[0, -1, -1, 1, 0, 2], 3).is_empty());
        assert!(found(&[], 0).is_empty());
    }
}

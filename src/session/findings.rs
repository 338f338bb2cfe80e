//! Unusual ids and weights of a rank: how many, and the first of each kind.

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
    /// Neither an expert nor -1.
    foreign: Kind,
    /// Experts that the token has named before.
    repeated: Kind,
    /// NaN weights of experts.
    nan: Kind,
}

impl Findings {
    /// Looks at int64 `ids` `[.., top_k]` for `experts` experts.
    pub(super) fn of_ids(ids: &[u8], top_k: usize, experts: usize) -> Self {
        let mut found = Self { experts, ..Self::default() };
        let ids = int64s(ids);
        for (token, ids) in ids.chunks(top_k.max(1)).enumerate() {
            for (k, &id) in ids.iter().enumerate() {
                let entry = Entry { token, k, id };
                if !found.is_expert(id) && id != -1 {
                    found.foreign.note(entry);
                }
                if found.is_expert(id) && ids.iter().take(k).any(|&before| before == id) {
                    found.repeated.note(entry);
                }
            }
        }
        found
    }

    /// Looks at the float32 weights of such ids.
    pub(super) fn of_weights((ids, weights): (&[u8], &[u8]), top_k: usize, experts: usize) -> Self {
        let mut found = Self { experts, ..Self::default() };
        let weights = weights.as_chunks().0.iter();
        for (entry, (id, weight)) in int64s(ids).into_iter().zip(weights).enumerate() {
            if found.is_expert(id) && f32::from_ne_bytes(*weight).is_nan() {
                let (token, k) = (entry / top_k.max(1), entry % top_k.max(1));
                found.nan.note(Entry { token, k, id });
            }
        }
        found
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
        let ids = bytes_of(&[0, 3, -1, -1, 3, 3, 4, -2, 1, 1, 1, 9]);
        let found = Findings::of_ids(&ids, 4, 4);
        assert_eq!(
            found.to_string(),
            "ids outside -1 to 3: 3 (first: token 1, k 2, id 4); \
             ids repeated within a token: 3 (first: token 1, k 1, id 3)"
        );
        assert!(Findings::of_ids(&bytes_of(&[0, -1, -1, 1, 0, 2]), 3, 4).is_empty());
        assert!(Findings::of_ids(&[], 0, 4).is_empty());
    }
}

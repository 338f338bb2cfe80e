//! Decides which rows are dropped if a rank lacks room for all: it keeps the first ones that it gets.

/// Remaining room for rows on each rank; if negative, the number of dropped rows.
pub struct Room {
    left: Vec<i64>,
    local_experts: usize,
}

impl Room {
    pub fn new(rows: Vec<i64>, local_experts: usize) -> Self {
        Self { left: rows, local_experts }
    }

    /// Takes room for the next token's rows, one per rank that its `ids` name. Sets the ids of full ranks to -1, and
    /// returns whether there were any.
    pub fn take(&mut self, ids: &mut [i64]) -> bool {
        let rank_of = |id: i64| usize::try_from(id).map_or(usize::MAX, |id| id / self.local_experts);
        let ranks: Vec<usize> = ids.iter().map(|&id| rank_of(id)).collect();
        for (k, &rank) in ranks.iter().enumerate() {
            if let Some(left) = self.left.get_mut(rank).filter(|_| ranks.iter().take(k).all(|it| *it != rank)) {
                *left -= 1;
            }
        }
        let mut drops = false;
        for (id, rank) in ids.iter_mut().zip(ranks) {
            if self.left.get(rank).is_some_and(|left| *left < 0) {
                (*id, drops) = (-1, true);
            }
        }
        drops
    }

    /// How many rows `rank` has dropped.
    pub fn dropped(&self, rank: usize) -> usize {
        self.left.get(rank).map_or(0, |&left| usize::try_from(-left).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rows_of_each_rank_stay() {
        let mut room = Room::new(vec![1, 2, 0], 2);
        let mut take = |mut ids: [i64; 4]| (room.take(&mut ids), ids);
        assert_eq!(take([1, 0, 3, 9]), (false, [1, 0, 3, 9]));
        assert_eq!(take([-7, 2, 0, 1]), (true, [-7, 2, -1, -1]));
        assert_eq!(take([4, 2, 5, 6]), (true, [-1, -1, -1, 6]));
        assert_eq!([0, 1, 2, 3].map(|rank| room.dropped(rank)), [1, 1, 1, 0]);
    }
}

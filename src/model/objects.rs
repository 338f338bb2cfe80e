//! Objects, that is memory of ranks which their peers map: finds the object that contains a tensor.

/// Most objects of a group at a time.
pub const MAX_OBJECTS: usize = 64;
/// Alignment of objects, and of tensors in them.
pub const OBJECT_ALIGN: u64 = 16;
/// Ranks exchange offsets as 32-bit multiples of the alignment, so only this many bytes can be addressed.
const REACHED_BYTES: u64 = OBJECT_ALIGN << 32;

/// A tensor's address in an object. All ranks number objects alike, but the offset need not be the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectOffset {
    pub object: u32,
    /// Offset from the start of this rank's memory of the object; a multiple of [`OBJECT_ALIGN`].
    pub offset: u64,
}

/// A rank's memory of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub begin: u64,
    /// Bytes; `begin + bytes` does not overflow.
    pub bytes: u64,
    pub object: u32,
}

impl Range {
    pub fn end(&self) -> u64 {
        self.begin + self.bytes
    }
}

/// A rank's memory of all objects of a group; no two overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range>);

impl Ranges {
    /// Adds a range that overlaps no other.
    pub fn insert(&mut self, range: Range) {
        self.0.insert(self.0.partition_point(|it| it.begin < range.begin), range);
    }

    pub fn remove(&mut self, object: u32) {
        self.0.retain(|it| it.object != object);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The range that overlaps the `bytes` at `begin`.
    pub fn overlaps(&self, begin: u64, bytes: u64) -> Option<Range> {
        let end = begin.saturating_add(bytes);
        let common = |it: &&Range| it.begin < end && begin < it.end();
        self.0.iter().find(common).copied()
    }

    /// The range that contains `address`.
    pub fn find(&self, address: u64) -> Option<Range> {
        let found = self.0.get(self.0.partition_point(|it| it.begin <= address).checked_sub(1)?)?;
        (address < found.end()).then_some(*found)
    }

    /// The address, in an object, of a tensor of `bytes` at `address`; `None` if kernels of peers could not access it,
    /// as it is not wholly in one object, too far from the object's start, or misaligned.
    pub fn locate(&self, address: u64, bytes: u64) -> Option<ObjectOffset> {
        let range = self.find(address)?;
        let offset = address - range.begin;
        let is_inside = bytes <= range.bytes - offset && offset.saturating_add(bytes) <= REACHED_BYTES;
        let is_aligned = address.is_multiple_of(OBJECT_ALIGN);
        (is_inside && is_aligned).then_some(ObjectOffset { object: range.object, offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(all: &[(u64, u64, u32)]) -> Ranges {
        let mut ranges = Ranges::default();
        for &(begin, bytes, object) in all {
            ranges.insert(Range { begin, bytes, object });
        }
        ranges
    }

    #[test]
    fn a_tensor_is_in_one_object_or_in_none() {
        let ranges = ranges(&[(4096, 64, 1), (0x8000, 0x1000, 0), (0x9000, 32, 5)]);
        let at = |address, bytes| ranges.locate(address, bytes).map(|it| (it.object, it.offset));
        assert_eq!(at(4096, 64), Some((1, 0)));
        assert_eq!(at(4112, 48), Some((1, 16)));
        assert_eq!(at(4096, 0), Some((1, 0)));
        assert_eq!(at(4112, 49), None, "past the end");
        assert_eq!(at(4104, 8), None, "not aligned");
        assert_eq!(at(4080, 32), None, "before the begin");
        assert_eq!(at(4160, 0), None, "behind the end");
        assert_eq!(at(0x8ff0, 16), Some((0, 0xff0)));
        assert_eq!(at(0x8ff0, 32), None, "in two objects");
        assert_eq!(at(0x9000, 32), Some((5, 0)));
        assert_eq!(at(0x9000, u64::MAX), None);
        assert_eq!(at(0, 16), None);
    }

    #[test]
    fn a_tensor_too_far_behind_the_beginning_is_in_none() {
        let ranges = ranges(&[(4096, 80 << 30, 2)]);
        let offset = |behind: u64, bytes| ranges.locate(4096 + behind, bytes).map(|it| it.offset);
        assert_eq!(offset((64 << 30) - 32, 32), Some((64 << 30) - 32));
        assert_eq!(offset((64 << 30) - 32, 48), None);
        assert_eq!(offset(64 << 30, 16), None);
    }

    #[test]
    fn ranges_do_not_overlap_and_go() {
        let mut ranges = ranges(&[(4096, 64, 1), (8192, 64, 0)]);
        for (begin, bytes) in [(4096, 64), (4000, 97), (4159, 1), (0, u64::MAX), (4100, 8)] {
            assert_eq!(ranges.overlaps(begin, bytes).map(|it| it.object), Some(1), "{begin} {bytes}");
        }
        for (begin, bytes) in [(4160, 16), (4000, 96), (8256, 1)] {
            assert_eq!(ranges.overlaps(begin, bytes), None);
        }
        let again = Range { begin: 4112, bytes: 16, object: 3 };
        ranges.remove(1);
        assert_eq!(ranges.locate(4096, 16), None);
        ranges.insert(again);
        assert_eq!(ranges.find(4120).map(|it| it.object), Some(3));
        ranges.remove(3);
        ranges.remove(0);
        assert!(ranges.is_empty());
    }
}

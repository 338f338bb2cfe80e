//! NCCL's element types as a Rust enum.

use std::ffi::c_int;

use super::error::{Failure, Outcome};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataType {
    Int8,
    Uint8,
    Int32,
    Uint32,
    Int64,
    Uint64,
    Float16,
    Float32,
    Float64,
    Bfloat16,
    Float8e4m3,
    Float8e5m2,
}

impl DataType {
    /// In the order of NCCL's numbers.
    const ALL: [Self; 12] = [
        Self::Int8,
        Self::Uint8,
        Self::Int32,
        Self::Uint32,
        Self::Int64,
        Self::Uint64,
        Self::Float16,
        Self::Float32,
        Self::Float64,
        Self::Bfloat16,
        Self::Float8e4m3,
        Self::Float8e5m2,
    ];

    pub(crate) fn from_c(number: c_int) -> Outcome<Self> {
        usize::try_from(number)
            .ok()
            .and_then(|index| Self::ALL.get(index).copied())
            .ok_or_else(|| Failure::argument(format!("datatype {number} does not exist")))
    }

    pub(crate) fn size(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 | Self::Float8e4m3 | Self::Float8e5m2 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }

    pub(crate) fn bytes(self, count: usize) -> Outcome<usize> {
        count
            .checked_mul(self.size())
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or_else(|| Failure::argument(format!("count {count} is too large")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_nccl() {
        assert_eq!(DataType::from_c(9).ok(), Some(DataType::Bfloat16));
        assert_eq!(DataType::from_c(11).ok(), Some(DataType::Float8e5m2));
        for bad in [-1, 12, c_int::MAX] {
            assert!(DataType::from_c(bad).is_err());
        }
    }

    #[test]
    fn sizes_do_not_overflow() {
        assert_eq!(DataType::Float64.bytes(3).ok(), Some(24));
        assert!(DataType::Float64.bytes(usize::MAX / 4).is_err());
        assert!(DataType::Int8.bytes(usize::MAX).is_err());
    }
}

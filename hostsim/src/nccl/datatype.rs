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

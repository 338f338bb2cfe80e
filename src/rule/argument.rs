//! A tensor argument of a call, and rules for it that several calls share.

use crate::error::refusal::{Extent, OfTensor, Role, Subject};
use crate::error::{Error, Result};
use crate::model::group::{GroupFacts, ROW_ALIGN};
use crate::model::ops::{IntWidth, RowType};
use crate::model::tensor::{DType, DevPtr, Tensor};
use std::fmt;

#[derive(Clone, Copy, Debug)]
pub struct Argument<'a> {
    role: Role,
    tensor: &'a Tensor,
}

impl<'a> Argument<'a> {
    pub fn new(role: Role, tensor: &'a Tensor) -> Self {
        Self { role, tensor }
    }

    /// The tensor in `role`, if the caller passed one.
    pub fn optional(role: Role, tensor: Option<&'a Tensor>) -> Option<Self> {
        tensor.map(|tensor| Self { role, tensor })
    }

    /// The tensor in `role`, which the call requires.
    pub fn required(role: Role, tensor: Option<&'a Tensor>) -> Result<Self> {
        Self::optional(role, tensor).ok_or_else(|| Self::missing(role))
    }

    /// The error of a call that lacks the tensor in `role`.
    #[cold]
    pub fn missing(role: Role) -> Error {
        Error::argument(Subject::Tensor(role), OfTensor::Required)
    }

    /// Refuses a tensor in `role`, by `rule`.
    pub fn absent(role: Role, tensor: Option<&Tensor>, rule: OfTensor) -> Result<()> {
        match tensor {
            Some(_) => Err(Error::argument(Subject::Tensor(role), rule)),
            None => Ok(()),
        }
    }

    /// The extent of dimension `index`; 0 if the tensor has no such dimension.
    pub fn size(&self, index: usize) -> usize {
        self.tensor.sizes().get(index).map_or(0, |&size| size as usize)
    }

    /// Checks that there are exactly `dims` dimensions.
    #[inline]
    pub fn dims(self, dims: usize) -> Result<Self> {
        let got = self.tensor.sizes().len();
        if got == dims {
            return Ok(self);
        }
        Err(Error::argument(Subject::Dims(self.role), OfTensor::Dims).got(got, dims))
    }

    /// Checks that dimension `index` is exactly `expected`; `what` names this number in an error.
    #[inline]
    pub fn size_is(self, index: usize, expected: usize, what: Extent) -> Result<Self> {
        if self.size(index) == expected {
            return Ok(self);
        }
        Err(self.wrong_size(index, OfTensor::Exactly(what), &expected))
    }

    /// Checks that dimension `index` is at least `least`; `what` names this number in an error.
    pub fn size_at_least(self, index: usize, least: usize, what: Extent) -> Result<Self> {
        if self.size(index) >= least {
            return Ok(self);
        }
        let expected = format_args!("{least} or more");
        Err(self.wrong_size(index, OfTensor::AtLeast(what), &expected))
    }

    /// Checks that dimension `index` is at most `most`; `what` names this number in an error.
    pub fn size_at_most(self, index: usize, most: usize, what: Extent) -> Result<Self> {
        if self.size(index) <= most {
            return Ok(self);
        }
        let expected = format_args!("{most} or less");
        Err(self.wrong_size(index, OfTensor::AtMost(what), &expected))
    }

    // Not inlined, as checks are a large part of an operation's host time.
    #[cold]
    fn wrong_size(&self, index: usize, rule: OfTensor, expected: &dyn fmt::Display) -> Error {
        Error::argument(Subject::Size(self.role, index), rule).got(self.size(index), expected)
    }

    #[inline]
    pub fn dtype_is(self, dtype: DType) -> Result<Self> {
        if self.tensor.dtype == Some(dtype) { Ok(self) } else { Err(self.wrong_dtype(dtype)) }
    }

    /// The width of its elements, if they may be ids.
    pub fn width(&self) -> Option<IntWidth> {
        self.tensor.dtype.and_then(IntWidth::of)
    }

    /// The error about its element type.
    #[cold]
    pub fn wrong_dtype(&self, expected: impl fmt::Display) -> Error {
        let error = Error::argument(Subject::ElementType(self.role), OfTensor::ElementType);
        match self.tensor.dtype {
            Some(got) => error.got(got, expected),
            None => error.got("an unknown number", expected),
        }
    }

    /// The address; refuses NULL unless the tensor is empty, and addresses that are not multiples of `align`.
    pub fn data(&self, align: usize) -> Result<DevPtr> {
        let data = self.tensor.data;
        let subject = Subject::Data(self.role);
        if data.is_null() && self.tensor.sizes().iter().all(|&size| size > 0) {
            return Err(Error::argument(subject, OfTensor::NotNullUnlessEmpty));
        }
        if !data.0.is_multiple_of(align) {
            return Err(Error::argument(subject, OfTensor::Aligned)
                .got(format_args!("{:#x}", data.0), format_args!("a multiple of {align}")));
        }
        Ok(data)
    }

    /// As [`Self::data`], but allows NULL.
    pub fn data_or_none(&self, align: usize) -> Result<DevPtr> {
        match self.tensor.data {
            none if none.is_null() => Ok(none),
            _ => self.data(align),
        }
    }

    /// The element type; an error if it is not one of NCCL's.
    #[inline]
    pub fn known_dtype(&self) -> Result<DType> {
        match self.tensor.dtype {
            Some(dtype) => Ok(dtype),
            None => Err(self.wrong_dtype("an NCCL element type")),
        }
    }

    /// Refuses the element type `got`, by `rule`.
    #[cold]
    pub fn refuse_dtype(&self, rule: OfTensor, got: DType, expected: impl fmt::Display) -> Error {
        Error::argument(Subject::ElementType(self.role), rule).got(got, expected)
    }

    pub fn num_dims(&self) -> usize {
        self.tensor.sizes().len()
    }

    /// The type of rows that a combine sums; `index` is the token tensor's last dimension.
    #[inline]
    pub fn summable_row(&self, index: usize, facts: &GroupFacts) -> Result<RowType> {
        let dtype = self.known_dtype()?;
        if dtype.is_summable() { self.row(index, dtype, facts) } else { Err(self.not_summable(dtype)) }
    }

    #[cold]
    fn not_summable(&self, got: DType) -> Error {
        let subject = Subject::ElementType(self.role);
        Error::usage(subject, OfTensor::Summable).got(got, "bfloat16, float16 or float32")
    }

    /// The type of rows of `dtype` that are as wide as this token tensor's; `index` is its last dimension.
    #[inline]
    pub fn row(&self, index: usize, dtype: DType, facts: &GroupFacts) -> Result<RowType> {
        let row = RowType { dtype, hidden: self.size(index) };
        let bytes = row.bytes();
        if bytes == 0 || !bytes.is_multiple_of(ROW_ALIGN) {
            return Err(self.wrong_row(index, OfTensor::RowMultipleOf16, bytes, &"a multiple of 16 bytes"));
        }
        self.row_fits(index, bytes, OfTensor::RowBound, facts)?;
        Ok(row)
    }

    /// Checks that `bytes` per row are within the group's bound.
    #[inline]
    pub fn row_fits(&self, index: usize, bytes: usize, rule: OfTensor, facts: &GroupFacts) -> Result<()> {
        if bytes <= facts.row_bytes {
            return Ok(());
        }
        Err(self.wrong_row(index, rule, bytes, &format_args!("at most {} bytes", facts.row_bytes)))
    }

    #[cold]
    fn wrong_row(&self, index: usize, rule: OfTensor, bytes: usize, expected: &dyn fmt::Display) -> Error {
        Error::argument(Subject::Size(self.role, index), rule).got(format_args!("{bytes} bytes"), expected)
    }

    /// Checks that this token tensor, with last dimension `index`, has rows of type `row`.
    pub fn row_is(self, index: usize, row: RowType) -> Result<Self> {
        self.dtype_is(row.dtype)?.size_is(index, row.hidden, Extent::InputHidden)
    }
}

/// The address of the counter in `role`, int32 `[L]`, if the caller passed one. `sized` is the rule for its extent,
/// which may allow a longer one.
pub fn expert_counter<'a>(
    role: Role,
    counter: Option<&'a Tensor>,
    facts: &GroupFacts,
    sized: impl FnOnce(Argument<'a>, usize, usize, Extent) -> Result<Argument<'a>>,
) -> Result<Option<DevPtr>> {
    self::counter(role, counter, |counter| sized(counter, 0, facts.local_experts(), Extent::LocalExperts))
}

/// As [`expert_counter`], for any one-dimensional int32 counter.
pub fn counter<'a>(
    role: Role,
    counter: Option<&'a Tensor>,
    sized: impl FnOnce(Argument<'a>) -> Result<Argument<'a>>,
) -> Result<Option<DevPtr>> {
    let Some(counter) = Argument::optional(role, counter) else { return Ok(None) };
    sized(counter.dims(1)?.dtype_is(DType::Int32)?)?.data(align_of::<i32>()).map(Some)
}

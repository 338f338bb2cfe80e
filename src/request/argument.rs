//! One tensor argument and the rules that several calls share.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::model::dtype::DType;
use crate::model::group::{GroupFacts, ROW_ALIGN};
use crate::model::ops::RowType;
use crate::model::tensor::{DevPtr, Tag, Tensor, TensorSet};
use std::fmt;

/// A tensor together with the name that refusals give it.
#[derive(Clone, Copy, Debug)]
pub struct Argument<'a> {
    name: Name,
    tensor: &'a Tensor,
}

#[derive(Clone, Copy, Debug)]
enum Name {
    Plain(&'static str),
    Tagged(&'static str, Tag),
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Plain(name) => f.write_str(name),
            Name::Tagged(list, tag) => write!(f, "{list}[{tag}]"),
        }
    }
}

impl<'a> Argument<'a> {
    /// A tensor that is a parameter of its own.
    pub fn plain(name: &'static str, tensor: &'a Tensor) -> Self {
        Self {
            name: Name::Plain(name),
            tensor,
        }
    }

    /// The tensor tagged `tag` of the list `list`, if the caller passed one.
    pub fn optional(list: &'static str, set: &'a TensorSet, tag: Tag) -> Option<Self> {
        set.get(tag).map(|tensor| Self {
            name: Name::Tagged(list, tag),
            tensor,
        })
    }

    /// The tensor tagged `tag` of the list `list`.
    pub fn required(list: &'static str, set: &'a TensorSet, tag: Tag) -> Result<Self> {
        Self::optional(list, set, tag)
            .ok_or_else(|| Error::argument(Name::Tagged(list, tag), "is required"))
    }

    /// Refuses the tensor tagged `tag` of the list `list` if the caller passed one.
    pub fn absent(list: &'static str, set: &TensorSet, tag: Tag, why: &str) -> Result<()> {
        match set.get(tag) {
            Some(_) => Err(Error::argument(Name::Tagged(list, tag), why)),
            None => Ok(()),
        }
    }

    /// The extent of dimension `index`; 0 if there is no such dimension.
    pub fn size(&self, index: usize) -> usize {
        self.tensor
            .sizes()
            .get(index)
            .map_or(0, |&size| size as usize)
    }

    /// Exactly `dims` dimensions.
    #[inline]
    pub fn dims(self, dims: usize) -> Result<Self> {
        let got = self.tensor.sizes().len();
        if got == dims {
            return Ok(self);
        }
        let rule = "must be the number of dimensions that this tensor has in this call";
        Err(Error::argument(format_args!("{}.ndim", self.name), rule).got(got, dims))
    }

    /// Dimension `index` is exactly `expected`, which is `what`.
    #[inline]
    pub fn size_is(self, index: usize, expected: usize, what: &str) -> Result<Self> {
        if self.size(index) == expected {
            return Ok(self);
        }
        Err(self.wrong_size(index, &format_args!("must be {what}"), &expected))
    }

    /// Dimension `index` is at least `least`, which is `what`.
    pub fn size_at_least(self, index: usize, least: usize, what: &str) -> Result<Self> {
        if self.size(index) >= least {
            return Ok(self);
        }
        let rule = format_args!("must be at least {what}");
        Err(self.wrong_size(index, &rule, &format_args!("{least} or more")))
    }

    /// Dimension `index` is at most `most`, which is `what`.
    pub fn size_at_most(self, index: usize, most: usize, what: &str) -> Result<Self> {
        if self.size(index) <= most {
            return Ok(self);
        }
        let rule = format_args!("must be at most {what}");
        Err(self.wrong_size(index, &rule, &format_args!("{most} or less")))
    }

    // Errors are made out of line: an operation's checks are a good part of what its call costs.
    #[cold]
    fn wrong_size(
        &self,
        index: usize,
        rule: &dyn fmt::Display,
        expected: &dyn fmt::Display,
    ) -> Error {
        Error::argument(format_args!("{}.sizes[{index}]", self.name), rule)
            .got(self.size(index), expected)
    }

    /// Elements are `dtype`.
    #[inline]
    pub fn dtype_is(self, dtype: DType) -> Result<Self> {
        if self.tensor.dtype != Some(dtype) {
            return Err(self.wrong_dtype(dtype));
        }
        Ok(self)
    }

    #[cold]
    fn wrong_dtype(&self, expected: impl fmt::Display) -> Error {
        let argument = format_args!("{}.datatype", self.name).to_string();
        let rule = "must be an element type that this tensor may have";
        match self.tensor.dtype {
            Some(got) => Error::argument(argument, rule).got(got, expected),
            None => Error::argument(argument, rule).got("an unknown number", expected),
        }
    }

    /// The address: not NULL unless the tensor is empty, and a multiple of `align`.
    pub fn data(&self, align: usize) -> Result<DevPtr> {
        let data = self.tensor.data;
        if data.is_null() && self.tensor.sizes().iter().all(|&size| size > 0) {
            return Err(Error::argument(
                format_args!("{}.data", self.name),
                "must not be NULL unless the tensor is empty",
            ));
        }
        if !data.0.is_multiple_of(align) {
            return Err(Error::argument(
                format_args!("{}.data", self.name),
                "must be aligned for its elements",
            )
            .got(
                format_args!("{:#x}", data.0),
                format_args!("a multiple of {align}"),
            ));
        }
        Ok(data)
    }

    /// The row type of a token tensor whose last dimension is `index`.
    pub fn token_row(&self, index: usize, facts: &GroupFacts) -> Result<RowType> {
        let dtype = match self.tensor.dtype {
            Some(dtype @ (DType::Bfloat16 | DType::Float16 | DType::Float32)) => dtype,
            Some(dtype) if dtype.is_fp8() => {
                return Err(Error::usage(
                    format_args!("{}.datatype", self.name),
                    "FP8 tokens are not supported yet",
                )
                .got(dtype, "bfloat16, float16 or float32"));
            }
            _ => return Err(self.wrong_dtype("bfloat16, float16 or float32")),
        };
        let row = RowType {
            dtype,
            hidden: self.size(index),
        };
        let refuse = |rule| Error::argument(format_args!("{}.sizes[{index}]", self.name), rule);
        if row.bytes() == 0 || !row.bytes().is_multiple_of(ROW_ALIGN) {
            return Err(refuse("a row must be a positive multiple of 16 bytes").got(
                format_args!("{} bytes", row.bytes()),
                "a multiple of 16 bytes",
            ));
        }
        if row.bytes() > facts.row_bytes {
            return Err(
                refuse("a row must not exceed the group's token_size_bytes").got(
                    format_args!("{} bytes", row.bytes()),
                    format_args!("at most {} bytes", facts.row_bytes),
                ),
            );
        }
        Ok(row)
    }

    /// This token tensor has rows of type `row`, its last dimension being `index`.
    pub fn row_is(self, index: usize, row: RowType) -> Result<Self> {
        self.dtype_is(row.dtype)?
            .size_is(index, row.hidden, "the hidden size of the input tokens")
    }
}

/// The address of the counter tagged `tag` of the local tensors, int32 `[L]`, if the caller passed one.
/// `sized`, one of the rules of an extent, says whether it may be longer.
pub fn expert_counter<'a>(
    locals: &'a TensorSet,
    tag: Tag,
    facts: &GroupFacts,
    sized: impl FnOnce(Argument<'a>, usize, usize, &str) -> Result<Argument<'a>>,
) -> Result<Option<DevPtr>> {
    let Some(counter) = Argument::optional("local_tensors", locals, tag) else {
        return Ok(None);
    };
    let counter = counter.dims(1)?.dtype_is(DType::Int32)?;
    let what = "the number of local experts";
    let counter = sized(counter, 0, facts.local_experts(), what)?;
    counter.data(align_of::<i32>()).map(Some)
}

/// Refuses scales, which only FP8 tokens have.
pub fn no_scales(list: &'static str, set: &TensorSet) -> Result<()> {
    match set.get(Tag::Scales) {
        Some(_) => Err(Error::usage(
            Name::Tagged(list, Tag::Scales),
            "FP8 tokens with scales are not supported yet",
        )),
        None => Ok(()),
    }
}

//! Choices of a tuning file under conditions: for rows of a certain size and layout, in memory that peers map or not.

use super::file::{number, shape, string};
use super::variant::{Choice, Operation, Variant};
use crate::log::shown;
use serde_json::Value;

crate::named! {
    /// Layout of an LL operation's rows, with its name in files.
    RowLayout:
    ByExpert = 0, "expert";
    ByRank = 1, "rank";
    InView = 2, "view";
}

impl RowLayout {
    /// The layout of rows by rank or expert, in a view or not.
    pub fn of(by_rank: bool, in_view: bool) -> Self {
        match (by_rank, in_view) {
            (_, true) => Self::InView,
            (true, false) => Self::ByRank,
            (false, false) => Self::ByExpert,
        }
    }
}

/// The rows of a call; `None`: unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of a row as it travels, without its scales.
    pub row_bytes: usize,
    /// Layout, in LL.
    pub layout: Option<RowLayout>,
    /// Whether peers map their memory.
    pub mapped: bool,
}

/// How to run an operation; `None` leaves it to the library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Best {
    /// The best variant.
    pub variant: Option<Variant>,
    /// Not checked yet.
    pub shape: Option<Choice>,
}

/// The best choices for operations, by the largest number of tokens that each applies to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Learned {
    entries: Vec<Entry>,
}

/// An entry's conditions, where they are given, and its choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    operation: Operation,
    tokens: u64,
    row_bytes: Option<u64>,
    layout: Option<RowLayout>,
    mapped: Option<bool>,
    variant: Option<Variant>,
    shape: Option<Choice>,
}

impl Learned {
    /// Parses a file's list of choices.
    pub fn parse(choices: &[Value]) -> Result<Self, String> {
        let entry = |(index, value)| Entry::parse(value).map_err(|reason| format!("choice {index}: {reason}"));
        Ok(Self { entries: choices.iter().enumerate().map(entry).collect::<Result<_, _>>()? })
    }

    /// The same with launch shapes of at most `blocks`; the file was measured without a group's bound.
    pub fn at_most(mut self, blocks: u32) -> Self {
        for shape in self.entries.iter_mut().filter_map(|entry| entry.shape.as_mut()) {
            if shape.fitting(u32::MAX).is_ok() {
                *shape = shape.at_most(blocks);
            }
        }
        self
    }

    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The variant and launch shape for an operation on `tokens`: those of the next larger measured number of tokens.
    ///
    /// The LL variant is instead that of the largest number of tokens, wherever rows lie: ranks must agree on how LL
    /// sums, but not on their number of tokens or memory.
    pub fn choice(&self, operation: Operation, tokens: usize, rows: Rows) -> Best {
        let agreed = self.fitting(operation, 0, rows, false).max_by_key(|entry| entry.tokens);
        let own = self.fitting(operation, tokens as u64, rows, true).min_by_key(|entry| entry.tokens);
        let variant = match operation {
            Operation::LlDispatch | Operation::LlCombine => agreed,
            Operation::HtDispatch | Operation::HtCombine => own,
        };
        let variant = variant.and_then(|entry| entry.variant);
        Best { variant, shape: own.and_then(|entry| entry.shape) }
    }

    fn fitting(&self, operation: Operation, tokens: u64, rows: Rows, by_memory: bool) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(move |entry| {
            entry.operation == operation
                && entry.tokens >= tokens
                && entry.row_bytes.is_none_or(|bytes| bytes == rows.row_bytes as u64)
                && (entry.layout.is_none() || rows.layout.is_none() || entry.layout == rows.layout)
                && (!by_memory || entry.mapped.is_none_or(|mapped| mapped == rows.mapped))
        })
    }
}

impl Entry {
    fn parse(entry: &Value) -> Result<Self, String> {
        let text = |name| entry.get(name).map(|_| string(entry, name)).transpose();
        let operation = Operation::of_file(&string(entry, "operation")?)?;
        let unknown = |name: &str, value: &str| format!("unknown {name} {:?}", shown(value));
        let variant = text("variant")?
            .map(|name| {
                let found = Variant::named(&name).filter(|variant| variant.is_of(operation));
                found.ok_or_else(|| unknown("variant", &name))
            })
            .transpose()?;
        let layout =
            text("layout")?.map(|name| RowLayout::named(&name).ok_or_else(|| unknown("layout", &name))).transpose()?;
        let mapped = text("memory")?
            .map(|name| match name.as_str() {
                "symmetric" => Ok(true),
                "plain" => Ok(false),
                _ => Err(unknown("memory", &name)),
            })
            .transpose()?;
        Ok(Self {
            operation,
            tokens: number(entry, "tokens")?,
            row_bytes: entry.get("row_bytes").map(|_| number(entry, "row_bytes")).transpose()?,
            layout,
            mapped,
            variant,
            shape: entry.get("blocks").map(|_| shape(entry)).transpose()?,
        })
    }
}

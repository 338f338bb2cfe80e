//! Launch shapes of a tuning file for plain rows.
//!
//! Handles put them into their plans, which also serve ranks with more tokens, for which they grow, several nodes, and
//! casts: so these are no [choices](super::Learned), which calls follow as they are.

use super::file::{number, shape, string};
use super::variant::{Choice, Operation};
use serde_json::Value;
use std::collections::BTreeMap;

/// What was best, by operation and number of tokens; `None`: the library's own choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shapes(BTreeMap<(Operation, u64), Option<Choice>>);

impl Shapes {
    /// Parses a file's list of entries for a GPU with this many `multiprocessors`.
    pub fn parse(entries: &[Value], multiprocessors: u32) -> Result<Self, String> {
        let parsed = entries
            .iter()
            .enumerate()
            .map(|(index, entry)| parse(entry, multiprocessors).map_err(|reason| format!("entry {index}: {reason}")));
        Ok(Self(parsed.collect::<Result<_, _>>()?))
    }

    /// Whether the library's own choices apply to everything.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The shape for `tokens`: that of the next larger measured number of tokens. `None`, also beyond the largest
    /// entry, is the library's own choice.
    pub fn choice(&self, operation: Operation, tokens: usize) -> Option<Choice> {
        let (_, choice) = self.0.range((operation, tokens as u64)..=(operation, u64::MAX)).next()?;
        *choice
    }
}

fn parse(entry: &Value, multiprocessors: u32) -> Result<((Operation, u64), Option<Choice>), String> {
    let operation = Operation::of_file(&string(entry, "operation")?)?;
    let tokens = number(entry, "tokens")?;
    if !tokens.is_power_of_two() {
        return Err("tokens must be a power of two".to_owned());
    }
    let is_own = entry.get("default").and_then(Value::as_bool) == Some(true);
    let fitting = || shape(entry)?.fitting(multiprocessors).map_err(|unfit| unfit.to_string());
    Ok(((operation, tokens), (!is_own).then(fitting).transpose()?))
}

//! The JSON that `nccl_ep.tune` writes, as plain data; docs/python.md describes it.

use super::choice::Choice;
use serde_json::Value;

const FORMAT: &str = "nccl_ep tuning";
const VERSION: u64 = 1;

/// A file of a known version, or its part for one GPU and number of ranks.
#[derive(Debug, PartialEq, Eq)]
pub struct File {
    /// The GPU's name, as the driver reports it.
    pub gpu: String,
    pub ranks: u64,
    /// Whether groups read the file again for each handle, as `nccl_ep.tune` wants while it measures.
    pub live: bool,
    /// The measured launch shapes.
    pub entries: Vec<Entry>,
    /// The choices under conditions, unparsed.
    pub choices: Vec<Value>,
}

/// The best launch shape of one operation for one number of tokens, not checked yet.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    /// Position in the file, for messages.
    pub number: usize,
    pub operation: String,
    pub tokens: u64,
    /// `None` if the library's `default` was best.
    pub shape: Option<Choice>,
}

impl File {
    /// Parses `text`, which may combine several files. Unknown fields are ignored.
    pub fn parse(text: &str) -> Result<Vec<Self>, String> {
        let root: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if string(&root, "format")? != FORMAT {
            return Err(format!("its format is not {FORMAT:?}"));
        }
        let version = number(&root, "version")?;
        if version != VERSION {
            return Err(format!("it has version {version}, and we know {VERSION}"));
        }
        match root.get("files").and_then(Value::as_array) {
            None => Ok(vec![Self::of(&root)?]),
            Some(files) => files.iter().map(Self::of).collect(),
        }
    }

    fn of(root: &Value) -> Result<Self, String> {
        let entries = root.get("entries").and_then(Value::as_array);
        let entries = entries.ok_or("it has no list of entries")?;
        Ok(Self {
            gpu: string(root, "gpu")?,
            ranks: number(root, "ranks")?,
            live: root.get("live").and_then(Value::as_bool) == Some(true),
            entries: entries
                .iter()
                .enumerate()
                .map(|(index, entry)| Entry::parse(index, entry))
                .collect::<Result<_, _>>()?,
            choices: match root.get("choices") {
                None => Vec::new(),
                Some(choices) => choices.as_array().cloned().ok_or("its choices are no list")?,
            },
        })
    }
}

impl Entry {
    fn parse(number_in_file: usize, entry: &Value) -> Result<Self, String> {
        let in_entry = |reason: String| format!("entry {number_in_file}: {reason}");
        Ok(Self {
            number: number_in_file,
            operation: string(entry, "operation").map_err(in_entry)?,
            tokens: number(entry, "tokens").map_err(in_entry)?,
            shape: match entry.get("default").and_then(Value::as_bool) {
                Some(true) => None,
                _ => Some(shape(entry).map_err(in_entry)?),
            },
        })
    }
}

/// The launch shape in an entry, not checked yet.
pub fn shape(entry: &Value) -> Result<Choice, String> {
    // A number that does not fit is too large for any GPU, too.
    let read = |name| number(entry, name).map(|it| u32::try_from(it).unwrap_or(u32::MAX));
    Ok(Choice { blocks: read("blocks")?, threads: read("threads")?, send_blocks: read("send_blocks")? })
}

/// The string field `name` of an object.
pub fn string(value: &Value, name: &str) -> Result<String, String> {
    let found = value.get(name).and_then(Value::as_str);
    found.map(str::to_owned).ok_or_else(|| format!("{name:?} is missing or no text"))
}

/// The number field `name` of an object.
pub fn number(value: &Value, name: &str) -> Result<u64, String> {
    let found = value.get(name).and_then(Value::as_u64);
    found.ok_or_else(|| format!("{name:?} is missing or no natural number"))
}

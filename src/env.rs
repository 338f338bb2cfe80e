//! Every environment variable that the library reads, as one immutable struct.
//!
//! A group reads it once, at its creation; `log` and `nvtx` once per process. Only `nccl::network` reads another
//! variable, which NCCL itself takes from the environment. `docs/env.md` lists the same names; a test compares.

mod later;

pub use crate::env::later::LaterEnv;
use crate::model::group::{LlCombineMode, NodeSums};
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

/// Settings taken from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Env {
    /// `NCCL_EP_TIMEOUT_MS`: how long any wait for another rank may last.
    pub timeout: Option<Duration>,
    /// `NCCL_EP_LL_COMBINE`: how LL combines sum, `exact` or `reduce`. By default as the ABI says.
    pub ll_combine: Option<LlCombineMode>,
    /// `NCCL_EP_NODE_SUMS`: how combines add the sums of nodes, `home` or `invariant`. Default home.
    pub node_sums: NodeSums,
    /// `NCCL_EP_TUNING_FILE`: launch shapes measured on this machine.
    pub tuning_file: Option<String>,
    /// `NCCL_EP_HT_CHUNK_BYTES`: bytes that an HT operation sends to other nodes at a time.
    pub ht_chunk_bytes: Option<usize>,
    /// `NCCL_EP_CHECK`: whether calls look at their ids and weights.
    pub check: bool,
    /// `NCCL_EP_PROGRAMMATIC`: whether kernels may be launched while those before them run.
    pub programmatic: bool,
    /// Variables of the later interface: budgets of SMs, and contradictions.
    pub later: LaterEnv,
    /// `NCCL_HOSTID`: replaces the machine's boot id when ranks are grouped into nodes.
    pub host_id: Option<String>,
    /// `NVTX_INJECTION64_PATH`: the library of a profiler that listens for ranges.
    pub nvtx_injection: Option<String>,
    /// `NCCL_DEBUG`: what is printed.
    pub verbosity: Verbosity,
    /// `NCCL_DEBUG_FILE`: the file for it, instead of stderr; `%h` and `%p` are still unexpanded.
    pub debug_file: Option<String>,
}

/// What the library prints; each level includes those before it, but only `Version` prints the version alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    Nothing,
    Version,
    /// Refusals.
    Warnings,
    /// New groups.
    Groups,
}

impl Verbosity {
    /// What a value of `NCCL_DEBUG` asks for.
    fn of(level: &str) -> Self {
        match level.trim().to_uppercase().as_str() {
            "VERSION" => Self::Version,
            "WARN" => Self::Warnings,
            "INFO" | "ABORT" | "TRACE" => Self::Groups,
            _ => Self::Nothing,
        }
    }
}

/// A variable that is set without effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unused {
    pub name: String,
    pub value: String,
    pub why: Why,
}

/// What is wrong with a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its value is not allowed; these are.
    Value(&'static str),
    /// Its name is unknown; this one may be meant.
    Name(Option<&'static str>),
}

/// The prefix of the project's own variables.
const PREFIX: &str = "NCCL_EP_";
const NCCL_LIBRARY: &str = "NCCL_EP_NCCL_LIBRARY";
/// Those read elsewhere: by [`nccl_library`], the Python package, the build, scripts.
const READ_ELSEWHERE: [&str; 12] = [
    NCCL_LIBRARY,
    "NCCL_EP_ARCHS",
    "NCCL_EP_CUDA",
    "NCCL_EP_DEPS",
    "NCCL_EP_ENGINES",
    "NCCL_EP_LIBRARIES",
    "NCCL_EP_LIBRARY",
    "NCCL_EP_NVCC",
    "NCCL_EP_RELEASE",
    "NCCL_EP_ROOT",
    "NCCL_EP_TARGET",
    "NCCL_EP_UPDATE_HEADER",
];

impl Env {
    /// Reads the process environment.
    pub fn read() -> Self {
        Self::from_reader(&mut Reader::new(&of_process))
    }

    /// The same, and the variables that are set without effect.
    pub fn read_and_check() -> (Self, Vec<Unused>) {
        let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
        Self::checked(names.collect(), &of_process)
    }

    fn checked(names: Vec<String>, lookup: Lookup<'_>) -> (Self, Vec<Unused>) {
        let mut reader = Reader::new(lookup);
        let env = Self::from_reader(&mut reader);
        let Reader { asked, unused, .. } = reader;
        let known = [asked.as_slice(), &READ_ELSEWHERE].concat();
        let is_known = |name: &str| known.contains(&name) || is_read_by_nvidia(name);
        let unknown = names.into_iter().filter(|name| name.starts_with(PREFIX) && !is_known(name)).map(|name| Unused {
            value: lookup(&name).unwrap_or_default(),
            why: Why::Name(most_alike(&name, &known)),
            name,
        });
        (env, unused.into_iter().chain(unknown).collect())
    }

    /// Empty and invalid values count as unset.
    fn from_reader(reader: &mut Reader<'_>) -> Self {
        let timeout_ms = reader.number("NCCL_EP_TIMEOUT_MS", "milliseconds, 1 or more");
        let ll_combine = reader.value("NCCL_EP_LL_COMBINE", "reduce or exact", LlCombineMode::named);
        let node_sums = reader.value("NCCL_EP_NODE_SUMS", "home or invariant", NodeSums::named);
        let chunk_bytes = reader.number("NCCL_EP_HT_CHUNK_BYTES", "bytes, 1 or more");
        let check = reader.switch("NCCL_EP_CHECK");
        let programmatic = reader.switch("NCCL_EP_PROGRAMMATIC");
        Self {
            timeout: timeout_ms.map(Duration::from_millis),
            ll_combine,
            node_sums: node_sums.unwrap_or_default(),
            tuning_file: reader.text("NCCL_EP_TUNING_FILE"),
            ht_chunk_bytes: chunk_bytes.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
            check: check.unwrap_or(false),
            programmatic: programmatic.unwrap_or(true),
            later: later_env(reader),
            host_id: reader.text("NCCL_HOSTID"),
            nvtx_injection: reader.text("NVTX_INJECTION64_PATH"),
            verbosity: reader.text("NCCL_DEBUG").map_or(Verbosity::Nothing, |level| Verbosity::of(&level)),
            debug_file: reader.text("NCCL_DEBUG_FILE"),
        }
    }
}

fn is_read_by_nvidia(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(later::is_read_by_nvidia)
}

fn later_env(reader: &mut Reader<'_>) -> LaterEnv {
    let mut sms = |name| reader.number(name, "SMs, 1 or more").map(|sms| u32::try_from(sms).unwrap_or(u32::MAX));
    let copies = ["NCCL_EP_HT_EM_LOCAL_DUP", "NCCL_EP_HT_EM_NVLINK_DUP"];
    LaterEnv {
        sms: sms("NCCL_EP_COMM_SMS"),
        dispatch_sms: sms("NCCL_EP_DISPATCH_SMS"),
        combine_sms: sms("NCCL_EP_COMBINE_SMS"),
        copies_twice: copies.map(|name| reader.switch(name)) == [Some(true); 2],
    }
}

/// `NCCL_EP_NCCL_LIBRARY`: path of the NCCL to use, read when the process creates its first group.
pub fn nccl_library() -> Option<Vec<u8>> {
    let path = std::env::var_os(NCCL_LIBRARY)?.into_vec();
    (!path.is_empty()).then_some(path)
}

/// Looks up the value of a variable.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

fn of_process(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Reads variables; records their names, and those with invalid values.
struct Reader<'a> {
    lookup: Lookup<'a>,
    asked: Vec<&'static str>,
    unused: Vec<Unused>,
}

impl<'a> Reader<'a> {
    fn new(lookup: Lookup<'a>) -> Self {
        Self { lookup, asked: Vec::new(), unused: Vec::new() }
    }

    fn text(&mut self, name: &'static str) -> Option<String> {
        self.asked.push(name);
        (self.lookup)(name).filter(|value| !value.is_empty())
    }

    /// The value of `name` as parsed; one that does not parse is recorded as unused, with what is `allowed`.
    fn value<T>(
        &mut self,
        name: &'static str,
        allowed: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let value = self.text(name)?;
        let parsed = parse(value.trim());
        if parsed.is_none() {
            let why = Why::Value(allowed);
            self.unused.push(Unused { name: name.to_owned(), value, why });
        }
        parsed
    }

    fn switch(&mut self, name: &'static str) -> Option<bool> {
        self.value(name, "0 or 1", |text| match text {
            "0" => Some(false),
            "1" => Some(true),
            _ => None,
        })
    }

    fn number(&mut self, name: &'static str, allowed: &'static str) -> Option<u64> {
        let positive = |text: &str| text.parse().ok().filter(|&number| number > 0);
        self.value(name, allowed, positive)
    }
}

/// The most similar of `names`: one is a prefix of the other, or few letters differ.
fn most_alike(name: &str, names: &[&'static str]) -> Option<&'static str> {
    const MOST_EDITS: usize = 2;
    let distance_to = |other: &str| {
        let is_same = other.starts_with(name) || name.starts_with(other);
        if is_same { 0 } else { strsim::levenshtein(name, other) }
    };
    let own = names.iter().filter(|other| other.starts_with(PREFIX));
    let nearest = own.map(|other| (distance_to(other), *other)).min()?;
    (name != PREFIX && nearest.0 <= MOST_EDITS).then_some(nearest.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lookup: Lookup<'_>) -> (Env, Vec<Unused>) {
        Env::checked(Vec::new(), lookup)
    }

    #[test]
    fn defaults_apply_when_nothing_is_set() {
        let (env, unused) = read(&|_| None);
        assert_eq!(env.timeout, None);
        assert_eq!(env.ll_combine, None);
        assert_eq!(env.node_sums, NodeSums::HomeFirst);
        assert_eq!(env.host_id, None);
        assert_eq!(env.verbosity, Verbosity::Nothing);
        assert_eq!((env.clone(), unused), read(&|_| Some(String::new())));
    }

    #[test]
    fn values_are_read() {
        let set = |name: &str| match name {
            "NCCL_EP_TIMEOUT_MS" => Some("250".to_owned()),
            "NCCL_HOSTID" => Some("left".to_owned()),
            "NCCL_EP_TUNING_FILE" => Some("times.json".to_owned()),
            "NCCL_EP_LL_COMBINE" => Some("exact".to_owned()),
            "NCCL_EP_NODE_SUMS" => Some("invariant ".to_owned()),
            "NCCL_DEBUG" => Some("info".to_owned()),
            "NCCL_EP_CHECK" => Some("1".to_owned()),
            "NCCL_EP_PROGRAMMATIC" => Some("0".to_owned()),
            "NCCL_EP_DISPATCH_SMS" => Some("24".to_owned()),
            "NCCL_EP_HT_EM_LOCAL_DUP" | "NCCL_EP_HT_EM_NVLINK_DUP" => Some("1".to_owned()),
            _ => None,
        };
        let (env, unused) = read(&set);
        assert_eq!(env.timeout, Some(Duration::from_millis(250)));
        assert_eq!(env.host_id.as_deref(), Some("left"));
        assert_eq!(env.ll_combine, Some(LlCombineMode::Exact));
        assert_eq!(env.node_sums, NodeSums::Invariant);
        assert_eq!(env.tuning_file.as_deref(), Some("times.json"));
        assert_eq!(env.verbosity, Verbosity::Groups);
        assert!(env.check && !env.programmatic);
        let later = LaterEnv { dispatch_sms: Some(24), copies_twice: true, ..LaterEnv::default() };
        assert_eq!(env.later, later);
        assert_eq!(unused, []);
    }

    #[test]
    fn values_that_are_not_allowed_are_told() {
        for value in ["-1", "00", "abc", "1k", "Exact"] {
            let (env, unused) = read(&|_| Some(value.to_owned()));
            assert_eq!(env.timeout, None);
            assert_eq!(env.ll_combine, None);
            assert_eq!(env.node_sums, NodeSums::HomeFirst);
            assert_eq!((env.ht_chunk_bytes, env.check), (None, false));
            assert!(env.programmatic);
            let told = |name: &str, allowed| Unused {
                name: name.to_owned(),
                value: value.to_owned(),
                why: Why::Value(allowed),
            };
            let expected = [
                told("NCCL_EP_TIMEOUT_MS", "milliseconds, 1 or more"),
                told("NCCL_EP_LL_COMBINE", "reduce or exact"),
                told("NCCL_EP_NODE_SUMS", "home or invariant"),
                told("NCCL_EP_HT_CHUNK_BYTES", "bytes, 1 or more"),
                told("NCCL_EP_CHECK", "0 or 1"),
                told("NCCL_EP_PROGRAMMATIC", "0 or 1"),
                told("NCCL_EP_COMM_SMS", "SMs, 1 or more"),
                told("NCCL_EP_DISPATCH_SMS", "SMs, 1 or more"),
                told("NCCL_EP_COMBINE_SMS", "SMs, 1 or more"),
                told("NCCL_EP_HT_EM_LOCAL_DUP", "0 or 1"),
                told("NCCL_EP_HT_EM_NVLINK_DUP", "0 or 1"),
            ];
            assert_eq!(unused, expected);
        }
    }

    #[test]
    fn unknown_names_are_told_with_the_one_that_is_meant() {
        let told = |name: &str| {
            let (_, unused) = Env::checked(vec![name.to_owned()], &|_| None);
            unused.first().map(|unused| unused.why)
        };
        let timeout = Some(Why::Name(Some("NCCL_EP_TIMEOUT_MS")));
        assert_eq!(told("NCCL_EP_TIMEOUT"), timeout);
        assert_eq!(told("NCCL_EP_TIMEOUT_MSEC"), timeout);
        assert_eq!(told("NCCL_EP_TIMOUT_M"), timeout);
        let combine = Some(Why::Name(Some("NCCL_EP_LL_COMBINE")));
        assert_eq!(told("NCCL_EP_LL_COMBNE"), combine);
        let library = Some(Why::Name(Some(NCCL_LIBRARY)));
        assert_eq!(told("NCCL_EP_NCCL_LIBARY"), library);
        assert_eq!(told("NCCL_EP_ENABLE_RDMA"), Some(Why::Name(None)));
        assert_eq!(told("NCCL_EP_"), Some(Why::Name(None)));
        for known in ["NCCL_EP_TIMEOUT_MS", "NCCL_EP_LIBRARY", "NCCL_EPS", "PATH", "NCCL_EP_HT_EM_AG_SCAN_MODE"] {
            assert_eq!(told(known), None, "{known}");
        }
    }

    #[test]
    fn docs_list_the_same_variables() {
        let docs = include_str!("../docs/env.md");
        let mut reader = Reader::new(&|_| None);
        let _ = Env::from_reader(&mut reader);
        for name in &reader.asked {
            assert!(docs.contains(&format!("| `{name}` |")), "docs/env.md lacks {name}");
        }
        let is_name = |word: &&str| word.starts_with(PREFIX) && *word != PREFIX;
        let names = docs.split('`').filter(is_name);
        let exported = include_str!("../scripts/env.sh").lines().filter_map(|line| line.split_once("export "));
        let exported = exported.flat_map(|(_, names)| names.split([' ', '=']));
        let exported = exported.filter(|name| name.starts_with(PREFIX));
        for name in names.chain(exported).map(|it| it.split('=').next()) {
            let name = name.unwrap_or_default();
            assert!(
                READ_ELSEWHERE.contains(&name) || is_read_by_nvidia(name) || reader.asked.contains(&name),
                "a group would warn of {name}"
            );
        }
    }
}

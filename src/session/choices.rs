//! Callers' choices of a variant and a launch shape for operations: set per operation, or returned by a selector that
//! each call runs.
//!
//! Order of precedence: set choice, selector, tuning file, the library's rule; a choice that cannot be followed is
//! skipped. As ranks must agree on a variant, a choice that names none leaves it to the file, and a variant stays even
//! if the launch shape does not fit, which depends on the rank's own tokens and bound.

use crate::log;
use crate::model::group::{GroupFacts, LlCombineMode};
use crate::model::ops::{HtPath, Launch};
use crate::tuning::{Best, Choice, Learned, Operation, RowLayout, Rows, Unfit, Variant};
use parking_lot::{Mutex, RwLock};
use std::cell::Cell;
use std::fmt::{self, Display, Formatter};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Properties of a call that are known before its operation is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// This rank's tokens.
    pub tokens: usize,
    pub top_k: usize,
    /// Bytes of a row as it travels, without its scales; 0 if unknown.
    pub row_bytes: usize,
    /// Whether peers map the rows that a dispatch delivers or a combine reads.
    pub mapped: bool,
    /// Layout of the rows, in LL.
    pub layout: Option<RowLayout>,
}

/// The argument of a selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    pub operation: Operation,
    pub about: About,
    pub ranks: usize,
    /// The largest grid allowed, in blocks; `None` if nothing is launched.
    pub most_blocks: Option<u32>,
}

/// A choice, not checked yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChoiceRequest {
    /// Number of a variant; 0: the library's own.
    pub variant: u32,
    pub launch: Launch,
}

impl From<Best> for ChoiceRequest {
    fn from(best: Best) -> Self {
        let launch = best.shape.map_or_else(Launch::default, |Choice { blocks, threads, send_blocks }| Launch {
            blocks,
            send_blocks,
            threads,
            in_order: false,
        });
        Self { variant: best.variant.map_or(0, |it| it as u32), launch }
    }
}

/// Chooses for each operation; `None` leaves the choice to the library.
pub type Selector = Arc<dyn Fn(&Query) -> Option<ChoiceRequest> + Send + Sync>;

/// A checked choice, as an operation uses it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) launch: Launch,
    /// LL combine: how it sums, and the number of ids per token for which that was checked.
    sums: Option<(LlCombineMode, usize)>,
    /// HT: the path of rows.
    pub(super) path: HtPath,
}

impl Chosen {
    /// How a combine with `top_k` ids per token sums: as chosen for that number, otherwise `own`.
    pub(super) fn sums(&self, top_k: usize, own: LlCombineMode) -> LlCombineMode {
        match self.sums {
            Some((sums, of)) if of == top_k => sums,
            _ => own,
        }
    }

    fn names_a_variant(&self) -> bool {
        self.sums.is_some() || self.path != HtPath::Auto
    }
}

/// Why a choice is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Impossible {
    UnknownVariant,
    OtherOperation(Variant),
    /// The windows of groups whose combines reduce have room for only one row of a token per rank.
    TooManyEntries,
    SeveralNodes(Variant),
    /// The rows are not in memory that peers map.
    NotMapped(Variant),
    Shape(Unfit),
}

pub(super) struct Choices {
    facts: GroupFacts,
    nodes: usize,
    most_blocks: Option<u32>,
    /// The tuning file's choices.
    learned: Learned,
    /// Whether there is any choice; if not, calls need not look.
    any: AtomicBool,
    made: RwLock<Made>,
    /// Warnings already given.
    warned: Mutex<Vec<(Operation, Impossible)>>,
}

#[derive(Clone, Default)]
struct Made {
    set: [Option<ChoiceRequest>; Operation::ALL.len()],
    selector: Option<Selector>,
}

thread_local! {
    /// Whether this thread is in a selector, where operations do not consult selectors.
    static SELECTING: Cell<bool> = const { Cell::new(false) };
}

impl Choices {
    /// For a group over `nodes`, whose grids have at most `most_blocks`.
    pub(super) fn new(facts: &GroupFacts, nodes: usize, most_blocks: Option<u32>, learned: Learned) -> Self {
        let granted = facts.channels.map(|channels| u32::try_from(2 * channels).unwrap_or(u32::MAX));
        let most_blocks = most_blocks.into_iter().chain(granted).min();
        Self {
            facts: *facts,
            nodes,
            most_blocks,
            any: AtomicBool::new(!learned.is_empty()),
            learned: match most_blocks {
                None => learned,
                Some(most) => learned.at_most(most),
            },
            made: RwLock::default(),
            warned: Mutex::default(),
        }
    }

    /// Sets the choice for `operation`; `None` removes it.
    pub(super) fn set(&self, operation: Operation, choice: Option<ChoiceRequest>) {
        self.change(|made| {
            if let Some(set) = made.set.get_mut(operation as usize) {
                *set = choice;
            }
        });
    }

    /// Sets the selector; `None` removes it.
    pub(super) fn select(&self, selector: Option<Selector>) {
        self.change(|made| made.selector = selector);
    }

    fn change(&self, change: impl FnOnce(&mut Made)) {
        let mut made = self.made.write();
        change(&mut made);
        let any = !self.learned.is_empty() || made.selector.is_some() || made.set.iter().any(Option::is_some);
        self.any.store(any, Ordering::Release);
    }

    /// The choice for `operation` in the call that `about` describes. To be called without locks, as a selector may
    /// take any time.
    #[inline]
    pub(super) fn of(&self, operation: Operation, about: impl FnOnce() -> Option<About>) -> Chosen {
        if !self.any.load(Ordering::Acquire) {
            return Chosen::default();
        }
        about().map_or_else(Chosen::default, |about| self.choose(operation, about))
    }

    #[cold]
    fn choose(&self, operation: Operation, about: About) -> Chosen {
        let made = self.made.read();
        let set = made.set.get(operation as usize).copied().flatten();
        let selector = made.selector.clone();
        drop(made);
        let possible = |request: &ChoiceRequest| self.possible(operation, about, request);
        let selected = || {
            let query = Query { operation, about, ranks: self.facts.ranks, most_blocks: self.most_blocks };
            select(selector.as_ref()?, &query)
        };
        let chosen = set.and_then(|request| possible(&request)).or_else(|| possible(&selected()?)).unwrap_or_default();
        if chosen.names_a_variant() {
            return chosen;
        }
        let About { tokens, row_bytes, mapped, layout, .. } = about;
        let learned = self.learned.choice(operation, tokens, Rows { row_bytes, layout, mapped });
        let learned = possible(&learned.into()).unwrap_or_default();
        let in_order = chosen.launch.in_order;
        let launch = if chosen.launch.is_own() { Launch { in_order, ..learned.launch } } else { chosen.launch };
        Chosen { launch, ..learned }
    }

    /// The checked choice for `operation`; `None`, with a warning the first time, if it cannot be followed.
    fn possible(&self, operation: Operation, about: About, request: &ChoiceRequest) -> Option<Chosen> {
        let chosen = match request.variant {
            0 => Ok(Chosen::default()),
            number => Variant::from_raw(number)
                .ok_or(Impossible::UnknownVariant)
                .and_then(|variant| self.variant(operation, about, variant)),
        };
        let chosen = chosen.map_err(|reason| self.warn(operation, reason)).ok()?;
        let launch = request.launch;
        match self.check(launch) {
            Ok(()) => Some(Chosen { launch, ..chosen }),
            Err(unfit) => {
                self.warn(operation, Impossible::Shape(unfit));
                let launch = Launch { in_order: launch.in_order, ..Launch::default() };
                chosen.names_a_variant().then_some(Chosen { launch, ..chosen })
            }
        }
    }

    fn warn(&self, operation: Operation, reason: Impossible) {
        let mut warned = self.warned.lock();
        if !warned.contains(&(operation, reason)) {
            warned.push((operation, reason));
            let what = if matches!(reason, Impossible::Shape(_)) { "the launch of a choice" } else { "a choice" };
            log::warn(&format!("{what} for {} is passed over: {reason}; that is said once", operation.name()));
        }
    }

    /// Refuses a launch that does not fit the group's bound.
    fn check(&self, launch: Launch) -> Result<(), Unfit> {
        let Launch { blocks, send_blocks, threads, .. } = launch;
        let most = self.most_blocks.unwrap_or(u32::MAX);
        let or = |requested, own| if requested == 0 { own } else { requested };
        let whole =
            Choice { blocks: or(blocks, most), threads: or(threads, Choice::WARP), send_blocks: or(send_blocks, 1) };
        whole.fitting(most).map(drop)
    }

    /// The checked choice of `variant` for `operation`, without a launch shape.
    fn variant(&self, operation: Operation, about: About, variant: Variant) -> Result<Chosen, Impossible> {
        if !variant.is_of(operation) {
            return Err(Impossible::OtherOperation(variant));
        }
        let top_k = about.top_k;
        let has_room = self.facts.ll_combine == LlCombineMode::Exact || top_k <= self.facts.ranks;
        let sums = |mode| Chosen { sums: Some((mode, top_k)), ..Chosen::default() };
        let goes = |path| Chosen { path, ..Chosen::default() };
        match variant {
            Variant::LlReduce => Ok(sums(LlCombineMode::Reduce)),
            Variant::HtRing => Ok(goes(HtPath::Ring)),
            _ if self.nodes > 1 => Err(Impossible::SeveralNodes(variant)),
            Variant::LlExact if !has_room => Err(Impossible::TooManyEntries),
            Variant::LlExact => Ok(sums(LlCombineMode::Exact)),
            Variant::HtDirect | Variant::HtPull if about.mapped => Ok(goes(HtPath::Direct)),
            Variant::HtDirect | Variant::HtPull => Err(Impossible::NotMapped(variant)),
        }
    }
}

/// Calls `selector`, unless this thread already is in one.
fn select(selector: &Selector, query: &Query) -> Option<ChoiceRequest> {
    struct Selecting;
    impl Drop for Selecting {
        fn drop(&mut self) {
            SELECTING.set(false);
        }
    }
    if SELECTING.replace(true) {
        return None;
    }
    let _selecting = Selecting;
    selector(query)
}

impl Display for Impossible {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownVariant => to.write_str("no variant has this number"),
            Self::OtherOperation(variant) => write!(to, "{} is of another operation", variant.name()),
            Self::TooManyEntries => {
                to.write_str("ll.exact needs as many ranks as ids of a token, or a group whose combines are exact")
            }
            Self::SeveralNodes(variant) => write!(to, "{} needs a group on one node", variant.name()),
            Self::NotMapped(variant) => write!(to, "{} needs rows in memory that peers map", variant.name()),
            Self::Shape(unfit) => unfit.fmt(to),
        }
    }
}

#[cfg(test)]
#[path = "choices_tests.rs"]
mod tests;

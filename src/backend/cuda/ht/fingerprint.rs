//! What ranks must agree on in an HT operation, in a word that travels with every row.
//!
//! Kernels only compare the word, and do not know its fields.

use crate::backend::cuda::agreement::disagreement;
use crate::backend::cuda::fault::{differs, op_value, other_rows};
use crate::backend::cuda::ht::grid::HtKind;
use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::params::common::{Fault, FaultReport, KernelOp};
use crate::backend::cuda::params::ht::{
    HT_FINGERPRINT_COMBINE, HT_FINGERPRINT_PAYLOAD_BITS, HT_FINGERPRINT_SCALED, HT_MAX_TOP_K,
};
use crate::error::refusal::{AmongRanks, Role, Subject};
use crate::error::{Error, Result};
use crate::model::group::ROW_ALIGN;
use crate::model::ids::GroupRank;
use crate::model::scales::WireRow;
use crate::model::tensor::DType;

/// Fields from the lowest bit: size of a row without scales, in units of 16 bytes; low bits of the handle's number; low
/// bits of the element type; a field that depends on the operation; whether it is a combine. In a combine the dependent
/// field has the columns of gradients per row; the type's low bits suffice, as only three types are possible. In a
/// dispatch it tells whether ids and weights travel, whether scales do, and has the rest of the type.
const UNITS_BITS: u32 = HT_FINGERPRINT_PAYLOAD_BITS;
const HANDLE_SHIFT: u32 = UNITS_BITS;
const HANDLE_BITS: u32 = 5;
const TYPE_SHIFT: u32 = HANDLE_SHIFT + HANDLE_BITS;
const TYPE_BITS: u32 = 3;
const COLUMNS_SHIFT: u32 = TYPE_SHIFT + TYPE_BITS;
const COLUMNS_BITS: u32 = 6;
const COMBINE_SHIFT: u32 = COLUMNS_SHIFT + COLUMNS_BITS;

const FORWARD: u32 = 1;
const SCALED: u32 = 2;
const HIGH_TYPE_SHIFT: u32 = 2;

const _: () = assert!(1 << COMBINE_SHIFT == HT_FINGERPRINT_COMBINE);
const _: () = assert!(SCALED << COLUMNS_SHIFT == HT_FINGERPRINT_SCALED);
const _: () = assert!((DType::LAST as u32) < 1 << (TYPE_BITS + COLUMNS_BITS - HIGH_TYPE_SHIFT));
const _: () = assert!(HT_MAX_TOP_K < 1 << COLUMNS_BITS);

/// The longest rows that the word can distinguish.
pub const MOST_ROW_BYTES: usize = ((1 << UNITS_BITS) - 1) * ROW_ALIGN;

/// An operation's fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HtFingerprint(pub u32);

impl HtFingerprint {
    /// The fingerprint of an operation of `kind` on rows of at most `MOST_ROW_BYTES`, still without a handle's number.
    pub fn new(kind: HtKind, row: WireRow) -> Result<Self> {
        let units = to_u32(row.payload.bytes() / ROW_ALIGN)?;
        let dtype = row.payload.dtype as u32;
        let scaled = row.scales.is_some();
        let (combine, field, fits) = match kind {
            HtKind::Dispatch { forward } => {
                let flags = u32::from(forward) * FORWARD + u32::from(scaled) * SCALED;
                (0, flags | dtype >> TYPE_BITS << HIGH_TYPE_SHIFT, true)
            }
            HtKind::Combine { columns } => {
                let fits = row.payload.dtype.is_summable() && !scaled;
                (1, to_u32(columns)?, fits)
            }
        };
        if units >> UNITS_BITS != 0 || field >> COLUMNS_BITS != 0 || !fits {
            return Err(Error::internal(format!("{kind:?} on {row:?} does not fit a fingerprint")));
        }
        Ok(Self(combine << COMBINE_SHIFT | field << COLUMNS_SHIFT | low_type(dtype) << TYPE_SHIFT | units))
    }

    /// This fingerprint with the number `handle`.
    pub fn of_handle(self, handle: u32) -> Self {
        let bits = handle % (1 << HANDLE_BITS);
        Self(self.0 | bits << HANDLE_SHIFT)
    }

    /// The low bits of the handle's number.
    pub fn handle(self) -> u32 {
        self.0 >> HANDLE_SHIFT & ((1 << HANDLE_BITS) - 1)
    }

    /// Whether the operation is a combine.
    pub fn is_combine(self) -> bool {
        self.0 >> COMBINE_SHIFT != 0
    }

    /// Columns of gradients of a combine.
    pub fn columns(self) -> u32 {
        self.0 >> COLUMNS_SHIFT & ((1 << COLUMNS_BITS) - 1)
    }

    /// The name of the element type; a word from a peer may have arbitrary bits.
    pub fn type_name(self) -> String {
        let low = low_type(self.0 >> TYPE_SHIFT);
        let (number, dtype) = if self.is_combine() {
            let has_bits = |dtype: &&DType| dtype.is_summable() && low_type(**dtype as u32) == low;
            (low, DType::ALL.iter().find(has_bits).copied())
        } else {
            let number = self.columns() >> HIGH_TYPE_SHIFT << TYPE_BITS | low;
            (number, DType::from_raw(number))
        };
        dtype.map_or_else(|| format!("type {number}"), |dtype| dtype.to_string())
    }

    /// Bytes of a row without its scales.
    pub fn row_bytes(self) -> usize {
        (self.0 & ((1 << UNITS_BITS) - 1)) as usize * ROW_ALIGN
    }
}

fn low_type(number: u32) -> u32 {
    number & ((1 << TYPE_BITS) - 1)
}

/// The error for a report about fingerprints, or about the verdict on a handle; `None` for other reports.
pub fn of_report(report: &FaultReport) -> Option<Error> {
    match Fault::from_raw(report.state)? {
        Fault::Differs => Some(other_shape(report)),
        Fault::Disagreed => Some(
            disagreement(report.got, report.expected).unwrap_or_else(|| Error::internal("a failure without a reason")),
        ),
        _ => None,
    }
}

/// The error that says in which property the two fingerprints of a report differ.
fn other_shape(report: &FaultReport) -> Error {
    let (mine, theirs) = (HtFingerprint(report.expected), HtFingerprint(report.got));
    let differs = |subject| differs(report, subject);
    let op = |word: HtFingerprint| {
        if word.is_combine() { KernelOp::HtCombine as u32 } else { KernelOp::HtDispatch as u32 }
    };
    if op(mine) != op(theirs) {
        return differs(Subject::Operation).found(op_value(op(mine)), op_value(op(theirs)));
    }
    if mine.handle() != theirs.handle() {
        return differs(Subject::Handle);
    }
    if mine.type_name() != theirs.type_name() {
        return differs(Subject::RowType).got(mine.type_name(), theirs.type_name());
    }
    if let Some(error) = other_rows(report, mine.row_bytes(), theirs.row_bytes()) {
        return error;
    }
    let rank = GroupRank::from(report.peer);
    if !mine.is_combine() {
        let rule = AmongRanks::SameDirection { rank };
        return Error::usage(Subject::Tensor(Role::IdsIn), rule);
    }
    let rule = AmongRanks::SameColumns { rank };
    Error::usage(Subject::Tensor(Role::WeightsIn), rule).got(mine.columns(), theirs.columns())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ops::RowType;
    use crate::model::scales::ScaleType;

    const SUMMABLE: [DType; 3] = [DType::Bfloat16, DType::Float16, DType::Float32];

    const KINDS: [HtKind; 4] = [
        HtKind::Dispatch { forward: true },
        HtKind::Dispatch { forward: false },
        HtKind::Combine { columns: 0 },
        HtKind::Combine { columns: 32 },
    ];

    fn word(kind: HtKind, dtype: DType, bytes: usize) -> Result<HtFingerprint> {
        let hidden = bytes / dtype.size();
        HtFingerprint::new(kind, RowType { dtype, hidden }.into())
    }

    #[test]
    fn operations_that_differ_have_different_words() {
        let mut words = Vec::new();
        for kind in KINDS {
            let is_combine = matches!(kind, HtKind::Combine { .. });
            let types = if is_combine { &SUMMABLE[..] } else { &DType::ALL };
            for &dtype in types {
                for bytes in [16, 32, 14_336, MOST_ROW_BYTES - 16, MOST_ROW_BYTES] {
                    let word = word(kind, dtype, bytes).unwrap();
                    assert!(!words.contains(&word), "{kind:?} {dtype} {bytes}");
                    words.push(word);
                    assert_eq!(word.is_combine(), is_combine);
                    if let HtKind::Combine { columns } = kind {
                        assert_eq!(word.columns() as usize, columns);
                    }
                    assert_eq!(word.type_name(), dtype.to_string());
                    assert_eq!(word.row_bytes(), bytes);
                    let other = word.of_handle(33);
                    assert_eq!((word.handle(), other.handle()), (0, 1));
                    assert_eq!(other.row_bytes(), bytes);
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for kind in KINDS {
            assert!(word(kind, DType::Bfloat16, MOST_ROW_BYTES + 16).is_err());
        }
        let combine = HtKind::Combine { columns: 0 };
        assert!(word(combine, DType::Int64, 16).is_err());
        let columns = 1 << COLUMNS_BITS;
        assert!(word(HtKind::Combine { columns }, DType::Bfloat16, 16).is_err());
        assert_eq!(HtFingerprint(u32::MAX >> 1).type_name(), "type 127");
        assert_eq!(HtFingerprint(u32::MAX).type_name(), "float32");
    }

    #[test]
    fn scales_change_the_word_and_nothing_that_it_tells() {
        let payload = RowType { dtype: DType::Float8E4M3, hidden: 7168 };
        let scales = Some(ScaleType { dtype: DType::Float32, count: 56 });
        let dispatch = HtKind::Dispatch { forward: true };
        let plain = HtFingerprint::new(dispatch, payload.into()).unwrap();
        let scaled = HtFingerprint::new(dispatch, WireRow { payload, scales }).unwrap();
        assert_eq!(scaled.0, plain.0 | HT_FINGERPRINT_SCALED);
        assert_eq!(scaled.row_bytes(), plain.row_bytes());
        assert_eq!(scaled.type_name(), "float8e4m3");
    }
}

//! The rows of a dispatch with scales, as its kernels take them.

use crate::backend::cuda::ht::plan::HtLaunch;
use crate::backend::cuda::ht::shared::saturated;
use crate::backend::cuda::params::common::{ScaledRows, Scales};
use crate::backend::cuda::params::ht::{HtCast, HtScaledRows};
use crate::backend::cuda::regions::to_u32;
use crate::backend::cuda::scaled_rows::{NO_VIEW, scaled_rows};
use crate::error::{Error, Result};
use crate::model::scales::{Scaled, WireRow};
use crate::model::tensor::{DType, RowType};

/// The caller's `scaled` rows as the kernels of `launch` take them.
pub fn from_caller(row: RowType, scaled: &Scaled, launch: &HtLaunch) -> Result<HtScaledRows> {
    let width = scaled.cast().map_or(row.dtype.size(), |cast| cast.from.size());
    Ok(HtScaledRows {
        rows: scaled_rows(row, scaled)?,
        word: launch.scales_word,
        out_rows: saturated(scaled.out.rows),
        token_bytes: to_u32(row.hidden * width)?,
        cast_chunk: launch.cast_chunk,
        cast_from: match scaled.cast().map(|cast| cast.from) {
            Some(DType::Float16) => HtCast::F16,
            Some(DType::Float32) => HtCast::F32,
            Some(DType::Bfloat16) | None => HtCast::Bf16,
            Some(other) => return Err(Error::internal(format!("no cast of rows of {other}"))),
        },
    })
}

/// The same for rows that have come from another node, each with its scales behind it.
pub fn as_they_travel(row: RowType, scaled: &Scaled, launch: &HtLaunch) -> Result<HtScaledRows> {
    let wire = WireRow { payload: row, scales: Some(scaled.scales) };
    let rows = ScaledRows { form: Scales::Forwarded, from: NO_VIEW, ..scaled_rows(row, scaled)? };
    Ok(HtScaledRows { rows, token_bytes: to_u32(wire.slot_bytes())?, ..from_caller(row, scaled, launch)? })
}

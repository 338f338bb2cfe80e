//! What a rank contributes to an exchange: a seal, a verdict, a payload.

use crate::error::{Formatter, Result};
use crate::model::hash::fnv1a;

/// Bytes of the verdict in front of each rank's payload: a code, then text.
pub const VERDICT_BYTES: usize = 512;
const CODE_BYTES: usize = 4;
/// Bytes of the seal in front of each rank's contribution.
const SEAL_BYTES: usize = size_of::<u64>();

/// `payload` behind the seal of exchange `exchange`.
pub fn sealed(exchange: u64, payload: &[u8]) -> Vec<u8> {
    [&seal(exchange, payload).to_le_bytes(), payload].concat()
}

/// The record of a rank that agrees, with a payload of `bytes` bytes, or that refuses.
pub fn verdict(mine: &Result<Vec<u8>>, bytes: usize, formatter: Formatter) -> Vec<u8> {
    let mut record = vec![0; VERDICT_BYTES + bytes];
    match mine {
        Ok(payload) => copy_prefix(&mut record, VERDICT_BYTES, payload),
        Err(error) => {
            copy_prefix(&mut record, 0, &(error.code() as i32).to_le_bytes());
            copy_prefix(&mut record, CODE_BYTES, clip(&formatter(error)).as_bytes());
        }
    }
    record
}

/// A checksum of an exchange's number and a rank's payload.
fn seal(exchange: u64, payload: &[u8]) -> u64 {
    fnv1a(exchange.to_le_bytes().iter().chain(payload))
}

/// The payload of a sealed record; `None` if it is missing or incomplete.
pub fn unsealed(exchange: u64, record: &[u8]) -> Option<&[u8]> {
    let (sealed, payload) = record.split_first_chunk::<SEAL_BYTES>()?;
    (u64::from_le_bytes(*sealed) == seal(exchange, payload)).then_some(payload)
}

/// The text of a refusing rank's record; `None` if that rank agreed.
pub fn refusal(record: &[u8]) -> Option<String> {
    let (verdict, _) = record.split_at_checked(VERDICT_BYTES)?;
    let (code, text) = verdict.split_at_checked(CODE_BYTES)?;
    if code.iter().all(|&byte| byte == 0) {
        return None;
    }
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    Some(String::from_utf8_lossy(text.get(..end).unwrap_or_default()).into_owned())
}

/// As much of `text` as a verdict holds, cut between characters.
fn clip(text: &str) -> &str {
    let end = (0..=text.len().min(VERDICT_BYTES - CODE_BYTES)).rev().find(|&end| text.is_char_boundary(end));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

fn copy_prefix(to: &mut [u8], offset: usize, from: &[u8]) {
    for (to, from) in to.iter_mut().skip(offset).zip(from) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_survives_its_record() {
        let mut record = vec![0; VERDICT_BYTES];
        assert_eq!(refusal(&record), None);
        copy_prefix(&mut record, 0, &4_i32.to_le_bytes());
        copy_prefix(&mut record, CODE_BYTES, "config.version: must be 1".as_bytes());
        assert_eq!(refusal(&record).as_deref(), Some("config.version: must be 1"));
    }

    #[test]
    fn a_seal_is_of_one_exchange_and_of_all_bytes() {
        let payload = [1, 2, 3];
        assert_eq!(seal(1, &payload), seal(1, &payload));
        assert_ne!(seal(1, &payload), seal(2, &payload));
        assert_ne!(seal(1, &payload), seal(1, &[1, 2, 0]));
        // A lost rank's record may be left as zeros.
        assert_ne!(seal(1, &[0; 16]), 0);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert!(clip(&"é".repeat(VERDICT_BYTES)).len() <= VERDICT_BYTES - CODE_BYTES);
        assert_eq!(clip("short"), "short");
    }
}

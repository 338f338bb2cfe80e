//! NCCL's functions for the library's own communicators.
#![allow(unsafe_code)]

use crate::backend::nccl::{All, Functions, ID_BYTES, OwnFunctions, UniqueId, check, dotted, functions};
use crate::error::refusal::{AmongRanks, Subject};
use crate::error::{Error, Result};
use crate::log;
use once_cell::sync::OnceCell;
use std::ffi::c_int;

/// The oldest usable NCCL, as `ncclGetVersion` counts. In 2.18 network errors do not reach `ncclCommGetAsyncError`, and
/// `ncclCommAbort` must not run concurrently with another call.
const OLDEST: c_int = 21900;
/// The oldest whose `ncclCommAbort` leaves freeing the communicator to a later call.
const FREES_LATER: c_int = 22200;
/// If set, this variable determines NCCL's ids.
const FIXED_ID: &str = "NCCL_COMM_ID";

/// These functions, of an NCCL that is new enough.
#[derive(Clone, Copy)]
pub struct Network {
    functions: &'static Functions,
    pub(super) own: &'static OwnFunctions,
}

impl Network {
    /// The functions of this process's NCCL, or the refusal of one that lacks them.
    pub fn of_process() -> Result<Self> {
        static WARNED: OnceCell<()> = OnceCell::new();
        check_ids(std::env::var(FIXED_ID).ok())?;
        let all = functions()?;
        let network = Self::of(all)?;
        if let Some(text) = shortcoming(version(&all.0)?) {
            WARNED.get_or_init(|| log::warn(&text));
        }
        Ok(network)
    }

    /// The functions of a given NCCL.
    pub(super) fn of((functions, own): &'static All) -> Result<Self> {
        let version = version(functions)?;
        if version < OLDEST {
            let refusal = Error::usage(Subject::Nccl, AmongRanks::NewEnoughForNetwork);
            return Err(refusal.got(dotted(version), "2.19 or newer"));
        }
        Ok(Self { functions, own: own.as_ref().map_err(|name| lacks(name))? })
    }

    /// The id by which the ranks of one new communicator find each other; this process must live until they have.
    pub fn new_id(&self) -> Result<[u8; ID_BYTES]> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: writes one id.
        let code = unsafe { (self.own.ncclGetUniqueId)(&mut id) };
        self.check("ncclGetUniqueId", code).map(|()| id.0)
    }

    /// Success, or an error that names the NCCL function.
    pub(super) fn check(&self, name: &str, code: c_int) -> Result<()> {
        check(self.functions, name, code)
    }
}

/// Refuses an id that the environment fixes: it is one address for all communicators, and several rails connect at the
/// same time.
fn check_ids(fixed: Option<String>) -> Result<()> {
    match fixed.filter(|id| !id.is_empty()) {
        None => Ok(()),
        Some(id) => {
            let refusal = Error::usage(Subject::Nccl, AmongRanks::OwnIdsForNetwork);
            Err(refusal.got(format!("{FIXED_ID}={id}"), "it unset"))
        }
    }
}

fn version(functions: &Functions) -> Result<c_int> {
    let get = functions.ncclGetVersion.ok_or_else(|| lacks("ncclGetVersion"))?;
    let mut version = 0;
    // SAFETY: writes one number.
    let code = unsafe { get(&mut version) };
    check(functions, "ncclGetVersion", code).map(|()| version)
}

/// What an NCCL of this version cannot do over several nodes.
fn shortcoming(version: c_int) -> Option<String> {
    (version < FREES_LATER).then(|| {
        format!(
            "NCCL {} frees memory in the call that aborts a communicator: when a group over nodes fails, calls that \
             use the same device may wait until all that runs there has ended; use 2.22 or newer",
            dotted(version)
        )
    })
}

fn lacks(name: &'static str) -> Error {
    Error::usage(Subject::Nccl, AmongRanks::HasForNetwork { name })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Cause;

    #[test]
    fn versions_are_written_as_people_do() {
        assert_eq!(dotted(2708), "2.7.8");
        assert_eq!(dotted(22803), "2.28.3");
    }

    #[test]
    fn a_version_that_cannot_keep_everything_says_so() {
        let text = shortcoming(22105).unwrap();
        assert!(text.starts_with("NCCL 2.21.5 frees memory in the call"), "{text}");
        assert!(text.contains("a group over nodes fails, calls that use the same device may wait"));
        assert_eq!(shortcoming(FREES_LATER), None);
    }

    #[test]
    fn an_id_of_the_environment_is_refused() {
        assert_eq!(check_ids(None), Ok(()));
        assert_eq!(check_ids(Some(String::new())), Ok(()));
        let refusal = check_ids(Some("10.0.0.1:4000".to_owned())).unwrap_err();
        let rule = AmongRanks::OwnIdsForNetwork.into();
        assert_eq!(refusal.report().cause, Cause::Refused(Subject::Nccl, rule));
    }
}

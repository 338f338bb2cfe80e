//! Creation and destruction of groups.
#![allow(unsafe_code)]

use crate::allocator::Allocator;
use crate::objects::{GROUPS, GUARD, Group, check_out, write_out};
use crate::types::{ncclComm_t, ncclEpGroup_t, ncclEpGroupConfig_t, ncclResult_t};
use crate::{info, read, settings, texts};
use nccl_ep_abi::{process, refuse};
use nccl_ep_core::backend::nccl::Communicator;
use nccl_ep_core::env::{Env, LaterEnv, Unused, Why};
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::{log, session};
use std::sync::Arc;

/// Creates a group over all ranks of `comm`. Collective: every rank calls it with the same `config`, and either all
/// ranks get a group or all get an error. Blocks the host; runs on a stream of the library's own.
///
/// A process has groups of this library or of the first release's `libnccl_ep.so`, not of both at a time.
///
/// @param ep_group  gets the group; written on success only
/// @param comm      communicator whose ranks form the group; must outlive the group
/// @param config    see `ncclEpGroupConfig_t`
///
/// Returns `ncclInvalidArgument` for a NULL pointer, or a `config` that breaks a rule or differs between ranks;
/// `ncclInvalidUsage` for half an allocator, more SMs than the device has, `NCCL_EP_OVERFLOW_DROP` without a bound of
/// rows, environment variables that contradict each other, what the library does not serve yet, a process that has
/// groups of another libnccl_ep, or if the ranks span several nodes and this process's NCCL cannot connect them;
/// `ncclRemoteError` if another rank refused or did not arrive in time; `ncclSystemError` if the process has no NCCL;
/// `ncclUnhandledCudaError` without a usable GPU; or the code of an NCCL call that failed.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpCreateGroup(
    ep_group: *mut ncclEpGroup_t,
    comm: ncclComm_t,
    config: *const ncclEpGroupConfig_t,
) -> ncclResult_t {
    GUARD.run("ncclEpCreateGroup", || {
        // Programs make this mistake on all ranks alike, and before they have a communicator.
        check_out("ep_group", ep_group)?;
        // SAFETY: this function's contract.
        let config = unsafe {
            not_first_release(config)?;
            read::required("config", config)?
        };
        let claim = process::claim("libnccl_ep.so.0");
        let given = settings::with_environment(config, &environment(comm));
        let given = given.and_then(|it| settings::of(&it));
        let settings = claim.as_ref().map_err(Error::clone).and(given);
        let core = settings.clone().map(|(core, _)| core);
        let session = session::create::group(comm as usize, core, texts::text, None)?;
        let (_, kept) = settings?;
        session.log_opening(info::version());
        let allocator = Allocator::of(&config.alloc, session.device());
        let session = session.keeping(claim?).with_blocks_from(allocator.clone());
        let comm = Communicator::open(comm as usize)?;
        let number = GROUPS.insert(Arc::new(Group { session: Arc::new(session), kept, comm, allocator }));
        // SAFETY: this function's contract.
        unsafe { write_out("ep_group", ep_group, number as ncclEpGroup_t) }
    })
}

/// Refuses the configuration of the first release, which begins with version 1 and an algorithm.
///
/// # Safety
/// `config` is NULL or points to eight bytes.
unsafe fn not_first_release(config: *const ncclEpGroupConfig_t) -> Result<()> {
    // SAFETY: this function's contract.
    if !config.is_null() && matches!(unsafe { config.cast::<[u32; 2]>().read_unaligned() }, [1, 0 | 1]) {
        let rule = "must be of this interface, but this program was built for the first release";
        return Err(refuse::argument("config", rule).got("libnccl_ep.so.0", "libnccl_ep.so"));
    }
    Ok(())
}

/// The environment's settings, without budgets above the device's SMs; the log names those.
fn environment(comm: ncclComm_t) -> LaterEnv {
    let env = Env::read().later;
    // The query needs the device's context, so it is made only if there is a budget.
    let asks = env.has_budget().then(|| session::create::multiprocessors(comm as usize));
    // If it fails, creating the group fails for the same reason and reports it.
    let Some(Ok(Some(all))) = asks else { return env };
    let (env, unused) = env.on_device(all);
    for (name, sms) in unused {
        let why = Why::Value("SMs, at most those of the device");
        log::in_vain(&Unused { name: name.to_owned(), value: sms.to_string(), why });
    }
    env
}

/// Destroys a group. Collective: every rank of the group calls it, before its communicator is destroyed. Blocks the
/// host until the group's operations have ended on all ranks. Launches of graphs that hold operations of the group must
/// have ended. NULL is a successful no-op. Later calls on the group's handles are refused. A failed group is destroyed
/// like any other: a failure that no call has returned is only logged, with NCCL_DEBUG=WARN.
///
/// Returns `ncclInvalidArgument` for a group that was destroyed already; `ncclRemoteError` if other ranks do not arrive
/// in time, or if operations do not end within twice that time because earlier work on their stream does not end: the
/// group is gone, and its memory stays allocated; `ncclSystemError` if `alloc.free_fn` fails, once the group is
/// destroyed.
///
/// # Safety
/// None: a dead or foreign group is recognised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGroupDestroy(ep_group: ncclEpGroup_t) -> ncclResult_t {
    let name = "ncclEpGroupDestroy";
    GUARD.destroy(name, || {
        if ep_group.is_null() {
            return Ok(());
        }
        let group = GROUPS.remove(ep_group as usize)?;
        // After a failure operations may still be running, so nothing is freed.
        group.session.close(None, |failure| {
            GUARD.warn(name, failure);
        })?;
        group.allocator.as_ref().map_or(Ok(()), |it| it.free_all())
    })
}

//! Converts a caller's configuration of a group to settings of the core, and to those that this ABI keeps.

use crate::enums::ncclEpOverflowPolicy_t;
use crate::read::known;
use crate::texts::not_served;
use crate::types::{ncclEpAllocConfig_t, ncclEpGroupConfig_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::env::LaterEnv;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::group::{Algorithm, GroupSettings, LlCombineMode};
use std::ffi::c_uint;
use std::time::Duration;

/// HT rows are multiples of this many bytes. LL rounds its bound up.
const ROW_ALIGN: c_uint = 16;
const DROP: u32 = ncclEpOverflowPolicy_t::NCCL_EP_OVERFLOW_DROP as u32;
/// SMs per channel, the core's unit.
const CHANNEL_SMS: usize = 2;

/// A group's settings that this ABI keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// HT: the rows that every dispatch has room for; `None`: as many as arrive.
    pub recv_rows: Option<usize>,
    /// HT: whether rows beyond that are dropped.
    pub drops: bool,
    /// HT: the largest K of a handle, if there is a bound.
    pub top_k: Option<usize>,
    /// Whether a mask of lost ranks was requested; HT accepts that, without having one.
    pub enable_mask: bool,
}

/// Applies the environment to `config`.
pub fn with_environment(mut config: ncclEpGroupConfig_t, env: &LaterEnv) -> Result<ncclEpGroupConfig_t> {
    if env.copies_twice {
        let text = "NCCL_EP_HT_EM_LOCAL_DUP: must not be 1 with NCCL_EP_HT_EM_NVLINK_DUP";
        return Err(Error::new(Code::InvalidUsage, text));
    }
    let set = |field: &mut c_uint, sms: Option<u32>| *field = sms.unwrap_or(*field);
    set(&mut config.max_num_sms, env.sms);
    set(&mut config.dispatch_num_sms, env.dispatch_sms.or(env.sms));
    set(&mut config.combine_num_sms, env.combine_sms.or(env.sms));
    Ok(config)
}

/// Checks what the core does not know of.
pub fn of(config: &ncclEpGroupConfig_t) -> Result<(GroupSettings, Kept)> {
    let algorithm = nccl_ep_abi::algorithm(config.algorithm)?;
    match algorithm {
        Algorithm::LowLatency if config.enable_mask != 0 => {
            return Err(not_served("config.enable_mask", "a mask of lost ranks"));
        }
        Algorithm::LowLatency if config.max_token_bytes == 0 => {
            return Err(refuse::argument("config.max_token_bytes", "must be positive").got(0, "1 or more"));
        }
        Algorithm::LowLatency => {}
        Algorithm::HighThroughput => high_throughput(config)?,
    }
    allocator(&config.alloc)?;
    known("config.overflow_policy", config.overflow_policy, 2)?;
    known("config.zero_copy", config.zero_copy, 2)?;
    let tokens = config.max_dispatch_tokens_per_rank;
    if tokens == 0 {
        let error = refuse::argument("config.max_dispatch_tokens_per_rank", "must be positive");
        return Err(error.got(tokens, "1 or more"));
    }
    let is_ht = algorithm == Algorithm::HighThroughput;
    let given = |number: c_uint| (is_ht && number > 0).then_some(number as usize);
    let kept = Kept {
        recv_rows: given(config.max_recv_tokens_per_rank),
        drops: is_ht && config.overflow_policy == DROP,
        top_k: given(config.num_topk),
        enable_mask: config.enable_mask != 0,
    };
    let row_bytes = config.max_token_bytes as usize;
    let settings = GroupSettings {
        algorithm,
        experts: config.num_experts as usize,
        max_tokens: Some(tokens as usize),
        // The core allocates for everything that ranks may send.
        row_bytes: row_bytes.next_multiple_of(ROW_ALIGN as usize),
        channels: channels(config),
        zones: is_ht,
        tensor_rows: kept.recv_rows.unwrap_or(0),
        drops: kept.drops,
        sms: sms(config),
        ll_combine: LlCombineMode::Exact,
        timeout: (config.timeout_ns > 0).then(|| Duration::from_nanos(config.timeout_ns)),
    };
    Ok((settings, kept))
}

fn high_throughput(config: &ncclEpGroupConfig_t) -> Result<()> {
    let bytes = config.max_token_bytes;
    if !bytes.is_multiple_of(ROW_ALIGN) {
        let error = refuse::argument("config.max_token_bytes", "must be a positive multiple of 16");
        return Err(error.got(bytes, "a multiple of 16"));
    }
    let (rows, tokens) = (config.max_recv_tokens_per_rank, config.max_dispatch_tokens_per_rank);
    if rows > 0 && rows < tokens {
        let rule = "must be at least max_dispatch_tokens_per_rank, or NCCL_EP_AUTO";
        let error = refuse::argument("config.max_recv_tokens_per_rank", rule);
        return Err(error.got(rows, format_args!("{tokens} or more")));
    }
    if config.num_topk > config.num_experts {
        let error = refuse::argument("config.num_topk", "must be at most the number of experts");
        return Err(error.got(config.num_topk, format_args!("{} or less", config.num_experts)));
    }
    if config.overflow_policy == DROP && rows == 0 {
        let text = "config.overflow_policy: must not be NCCL_EP_OVERFLOW_DROP without max_recv_tokens_per_rank";
        return Err(Error::new(Code::InvalidUsage, text));
    }
    Ok(())
}

fn allocator(alloc: &ncclEpAllocConfig_t) -> Result<()> {
    if alloc.alloc_fn.is_some() == alloc.free_fn.is_some() {
        return Ok(());
    }
    let text = "config.alloc: must have both functions or none";
    Err(Error::new(Code::InvalidUsage, text))
}

/// The largest budget of SMs, if any is set.
fn sms(config: &ncclEpGroupConfig_t) -> Option<usize> {
    let own = config.dispatch_num_sms.max(config.combine_num_sms);
    let most = own.max(config.max_num_sms) as usize;
    (most > 0).then_some(most)
}

/// The channels of the largest budget, which operations then have; if none is set, the library chooses.
fn channels(config: &ncclEpGroupConfig_t) -> Option<usize> {
    let own = config.dispatch_num_sms.max(config.combine_num_sms);
    let inherits = config.dispatch_num_sms == 0 || config.combine_num_sms == 0;
    let sms = own.max(if inherits { config.max_num_sms } else { 0 }) as usize;
    (sms > 0).then(|| (sms / CHANNEL_SMS).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::enums::ncclEpAlgorithm_t;
    use crate::read::MAGIC;
    use std::mem::MaybeUninit;

    fn config(algorithm: ncclEpAlgorithm_t) -> ncclEpGroupConfig_t {
        // SAFETY: zeros are a value of every field.
        #[allow(unsafe_code)]
        let mut config: ncclEpGroupConfig_t = unsafe { MaybeUninit::zeroed().assume_init() };
        config.size = size_of::<ncclEpGroupConfig_t>() as c_uint;
        config.magic = MAGIC;
        config.algorithm = algorithm as c_uint;
        config.num_experts = 8;
        config.max_dispatch_tokens_per_rank = 5;
        config.max_recv_tokens_per_rank = 10;
        config.max_token_bytes = 32;
        config
    }

    const LL: ncclEpAlgorithm_t = ncclEpAlgorithm_t::NCCL_EP_ALGO_LOW_LATENCY;
    const HT: ncclEpAlgorithm_t = ncclEpAlgorithm_t::NCCL_EP_ALGO_HIGH_THROUGHPUT;

    #[test]
    fn settings_are_read_by_mode() {
        let mut given = config(HT);
        given.num_topk = 4;
        given.dispatch_num_sms = 24;
        given.max_num_sms = 16;
        let (core, kept) = of(&given).unwrap();
        assert_eq!((kept.recv_rows, kept.top_k), (Some(10), Some(4)));
        assert_eq!((core.max_tokens, core.channels), (Some(5), Some(12)));
        for (dispatch, combine, both, channels) in
            [(24, 0, 0, Some(12)), (0, 8, 32, Some(16)), (24, 8, 32, Some(12)), (0, 1, 0, Some(1)), (0, 0, 0, None)]
        {
            (given.dispatch_num_sms, given.combine_num_sms) = (dispatch, combine);
            given.max_num_sms = both;
            let core = of(&given).unwrap().0;
            let requested = dispatch.max(combine).max(both) as usize;
            assert_eq!((core.channels, core.sms), (channels, Some(requested).filter(|sms| *sms > 0)));
        }
        let mut given = config(LL);
        given.max_recv_tokens_per_rank = 1;
        given.num_topk = 9;
        given.max_token_bytes = 30;
        given.timeout_ns = 7;
        let (core, kept) = of(&given).unwrap();
        assert_eq!((kept.recv_rows, core.row_bytes, core.channels), (None, 32, None));
        assert_eq!(core.timeout, Some(Duration::from_nanos(7)));
    }

    #[test]
    fn the_environment_goes_before_a_configuration() {
        let mut given = config(HT);
        (given.max_num_sms, given.dispatch_num_sms) = (16, 20);
        let budgets = |env: LaterEnv| {
            let it = with_environment(given, &env).unwrap();
            [it.max_num_sms, it.dispatch_num_sms, it.combine_num_sms]
        };
        let none = LaterEnv::default();
        assert_eq!(budgets(none), [16, 20, 0]);
        assert_eq!(budgets(LaterEnv { sms: Some(8), ..none }), [8, 8, 8]);
        assert_eq!(budgets(LaterEnv { sms: Some(8), combine_sms: Some(4), ..none }), [8, 8, 4]);
        assert_eq!(budgets(LaterEnv { dispatch_sms: Some(2), ..none }), [16, 2, 0]);
        let refused = with_environment(given, &LaterEnv { copies_twice: true, ..none });
        assert_eq!(refused.err().map(|error| error.code()), Some(Code::InvalidUsage));
    }

    #[test]
    fn any_numbers_are_settings_or_refused() {
        let mut state = 7_u64;
        let mut accepted = 0;
        for _ in 0..20_000 {
            let mut bytes = [0_u8; size_of::<ncclEpGroupConfig_t>()];
            for byte in bytes.iter_mut().step_by(4) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let drawn = (state >> 56) as u8;
                // Small numbers, as enums have, and arbitrary ones.
                *byte = if drawn.is_multiple_of(3) { drawn } else { drawn % 4 };
            }
            // No address is followed; the two functions, set or not, are not called.
            bytes[56..72].fill((state >> 60) as u8 % 2);
            #[allow(unsafe_code)]
            // SAFETY: zeros and any numbers are values of every field.
            let config: ncclEpGroupConfig_t = unsafe { std::mem::transmute(bytes) };
            accepted += usize::from(of(&config).is_ok());
        }
        assert!(accepted > 100, "{accepted}");
    }
}

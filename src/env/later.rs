//! What programs of the later interface set.

/// What only programs of the later interface set; these go before a group's configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaterEnv {
    /// `NCCL_EP_COMM_SMS`: SMs of all operations.
    pub sms: Option<u32>,
    /// `NCCL_EP_DISPATCH_SMS`, `NCCL_EP_COMBINE_SMS`: of one kind.
    pub dispatch_sms: Option<u32>,
    pub combine_sms: Option<u32>,
    /// `NCCL_EP_HT_EM_LOCAL_DUP` and `NCCL_EP_HT_EM_NVLINK_DUP`, of which NVIDIA's library takes one: both are set.
    pub copies_twice: bool,
}

/// Those of NVIDIA's library alone begin so: how it compiles kernels and shapes them, where it is.
const OTHERS: [&str; 11] = [
    "COMBINE_NUM_",
    "DISABLE_GUARD",
    "DISPATCH_COPY_MODE",
    "DISPATCH_NUM_",
    "HOME",
    "HT_EM_",
    "HT_GIN_",
    "HT_UNFUSED_SYNC",
    "JIT_",
    "SHUFFLE_SMS",
    "PREPROCESS_NUM_SMS",
];

/// Whether nobody is to be warned of the variable with this name behind the prefix, though it is not read.
pub(super) fn is_of_others(name: &str) -> bool {
    OTHERS.iter().any(|begin| name.starts_with(begin))
}

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

impl LaterEnv {
    /// Whether SMs are bounded.
    pub fn has_budget(&self) -> bool {
        [self.sms, self.dispatch_sms, self.combine_sms].iter().any(Option::is_some)
    }

    /// On a device with `all` SMs: without the budgets that it has not, and these by name, which are set in vain.
    pub fn on_device(self, all: u32) -> (Self, Vec<(&'static str, u32)>) {
        let mut unused = Vec::new();
        let mut fitting = |name, sms: Option<u32>| {
            let fits = sms.filter(|asked| *asked <= all);
            unused.extend(sms.filter(|_| fits.is_none()).map(|asked| (name, asked)));
            fits
        };
        let fits = Self {
            sms: fitting("NCCL_EP_COMM_SMS", self.sms),
            dispatch_sms: fitting("NCCL_EP_DISPATCH_SMS", self.dispatch_sms),
            combine_sms: fitting("NCCL_EP_COMBINE_SMS", self.combine_sms),
            ..self
        };
        (fits, unused)
    }
}

/// Those of NVIDIA's library alone begin so: how it compiles kernels and shapes them, what it tells, where it is.
const OTHERS: [&str; 14] = [
    "COMBINE_NUM_",
    "DEBUG",
    "DISABLE_GUARD",
    "DISPATCH_COPY_MODE",
    "DISPATCH_NUM_",
    "ENV_VERBOSE",
    "HOME",
    "HT_EM_",
    "HT_GIN_",
    "HT_UNFUSED_SYNC",
    "JIT_",
    "PREPROCESS_NUM_SMS",
    "SHUFFLE_SMS",
    // How many go in a chunk. The rest of the name is a word of the interfaces (tests/abi_words.rs).
    "TOKEN",
];

/// Whether nobody is to be warned of the variable with this name behind the prefix, though it is not read.
pub(super) fn is_of_others(name: &str) -> bool {
    OTHERS.iter().any(|begin| name.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_of_more_than_the_device_has_are_set_in_vain() {
        let (sms, dispatch_sms, combine_sms) = (Some(133), Some(132), Some(u32::MAX));
        let asked = LaterEnv { sms, dispatch_sms, combine_sms, copies_twice: true };
        let (fits, unused) = asked.on_device(132);
        assert_eq!(fits, LaterEnv { sms: None, combine_sms: None, ..asked });
        assert!(fits.has_budget() && !fits.on_device(131).0.has_budget());
        assert_eq!(unused, [("NCCL_EP_COMM_SMS", 133), ("NCCL_EP_COMBINE_SMS", u32::MAX)]);
    }
}

//! Variables of programs written for the later interface.

/// Variables that only such programs set; they override a group's configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaterEnv {
    /// `NCCL_EP_COMM_SMS`: SMs of all operations.
    pub sms: Option<u32>,
    /// `NCCL_EP_DISPATCH_SMS`, `NCCL_EP_COMBINE_SMS`: SMs of one kind of operation.
    pub dispatch_sms: Option<u32>,
    pub combine_sms: Option<u32>,
    /// Whether `NCCL_EP_HT_EM_LOCAL_DUP` and `NCCL_EP_HT_EM_NVLINK_DUP` are both set; NVIDIA's library takes only one.
    pub copies_twice: bool,
}

impl LaterEnv {
    /// Whether any variable bounds the number of SMs.
    pub fn has_budget(&self) -> bool {
        [self.sms, self.dispatch_sms, self.combine_sms].iter().any(Option::is_some)
    }

    /// For a device with `all` SMs: the variables without budgets above that, and those budgets by name.
    pub fn on_device(self, all: u32) -> (Self, Vec<(&'static str, u32)>) {
        let mut unused = Vec::new();
        let mut fitting = |name, sms: Option<u32>| {
            let fits = sms.filter(|requested| *requested <= all);
            unused.extend(sms.filter(|_| fits.is_none()).map(|requested| (name, requested)));
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

/// Prefixes of variables that only NVIDIA's library reads: for its JIT, kernel shapes, messages and files.
const READ_BY_NVIDIA: [&str; 14] = [
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
    // Tokens per chunk. The rest of the name is a word of the interfaces (tests/layering.rs).
    "TOKEN",
];

/// Whether the variable `PREFIX` + `name` is not read here, but needs no warning.
pub(super) fn is_read_by_nvidia(name: &str) -> bool {
    READ_BY_NVIDIA.iter().any(|begin| name.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_of_more_than_the_device_has_are_set_in_vain() {
        let (sms, dispatch_sms, combine_sms) = (Some(133), Some(132), Some(u32::MAX));
        let requested = LaterEnv { sms, dispatch_sms, combine_sms, copies_twice: true };
        let (fits, unused) = requested.on_device(132);
        assert_eq!(fits, LaterEnv { sms: None, combine_sms: None, ..requested });
        assert!(fits.has_budget() && !fits.on_device(131).0.has_budget());
        assert_eq!(unused, [("NCCL_EP_COMM_SMS", 133), ("NCCL_EP_COMBINE_SMS", u32::MAX)]);
    }
}

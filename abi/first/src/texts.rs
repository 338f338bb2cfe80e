//! The names of this ABI in the core's refusals. `docs/errors.md` lists all texts.

use nccl_ep_abi::texts::{self, Names};
use nccl_ep_core::error::Error;
use nccl_ep_core::error::refusal::{Role, Setting};

const NAMES: Names = Names {
    tensor,
    setting,
    send_only: "send_only",
    round_scales: "config.round_scales",
    casts_by_types: true,
    row_bytes: "token_size_bytes",
    max_tokens: "the group's max_tokens_per_rank",
    recv_rows: "ranks times max_tokens_per_rank",
};

/// One line: the context, the argument, the rule, got and expected.
#[cold]
pub fn text(error: &Error) -> String {
    texts::text(error, &NAMES)
}

fn setting(setting: Setting) -> &'static str {
    match setting {
        Setting::Algorithm => "config.algorithm",
        Setting::Experts => "config.num_experts",
        // This ABI has no separate bound of received rows.
        Setting::MaxTokens | Setting::RecvRows | Setting::Overflow => "config.max_tokens_per_rank",
        Setting::RowBytes => "config.token_size_bytes",
        Setting::LlCombine => "NCCL_EP_LL_COMBINE",
        Setting::NodeSums => "NCCL_EP_NODE_SUMS",
        Setting::HtChunkBytes => "NCCL_EP_HT_CHUNK_BYTES",
    }
}

fn tensor(role: Role) -> &'static str {
    match role {
        Role::Ids => "topk_idx",
        Role::TokensIn => "inputs[TOKENS]",
        Role::TokensOut => "outputs[TOKENS]",
        Role::ScalesIn => "inputs[SCALES]",
        Role::ScalesOut => "outputs[SCALES]",
        Role::IdsIn => "inputs[TOPK_IDX]",
        Role::IdsOut => "outputs[TOPK_IDX]",
        Role::WeightsIn => "inputs[TOPK_WEIGHTS]",
        Role::WeightsOut => "outputs[TOPK_WEIGHTS]",
        Role::TokenWeights => "local_tensors[TOPK_WEIGHTS]",
        Role::Counter => "local_tensors[RECV_EXPERT_COUNTER_DEVICE]",
        Role::HostCounter => "local_tensors[RECV_EXPERT_COUNTER_HOST]",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_ep_core::error::refusal::{AmongRanks, Operation, Subject};
    use nccl_ep_core::error::{Code, Context};
    use nccl_ep_core::model::ids::GroupRank;

    #[test]
    fn a_call_is_named_once() {
        let failed = Error::internal("deadline passed").during(Context::Running(Operation::HtHandle));
        assert_eq!(text(&failed.clone().within("ncclEpCreateHandle")), "ncclEpCreateHandle: deadline passed");
        assert_eq!(
            text(&failed.within("ncclEpGetAsyncError")),
            "ncclEpGetAsyncError: ncclEpCreateHandle: deadline passed"
        );
    }

    #[test]
    fn a_refusal_of_another_rank_is_named_by_its_code() {
        let code = Code::InvalidUsage;
        let rank = GroupRank::new(71);
        let rule = AmongRanks::RefusedBy { rank, code };
        let error = Error::refusal(Code::RemoteError, Subject::Handle, rule).and(Error::internal("another thing"));
        assert_eq!(text(&error), "handle: rank 71 refused to create its own: ncclInvalidUsage; and another thing");
    }
}

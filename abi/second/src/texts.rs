//! The names of this ABI in the core's refusals. `docs/abi-second.md` says how a program gets the texts.

use nccl_ep_abi::texts::{self, Names};
use nccl_ep_core::error::refusal::{Role, Setting};
use nccl_ep_core::error::{Code, Error};
use std::fmt::Display;

const NAMES: Names = Names {
    tensor,
    setting,
    send_only: "config.send_only",
    round_scales: "config.round_scales",
    casts_by_types: false,
    row_bytes: "max_token_bytes",
    max_tokens: "the group's max_dispatch_tokens_per_rank",
    recv_rows: "ranks times max_dispatch_tokens_per_rank",
};

/// One line: the context, the argument, the rule, got and expected.
#[cold]
pub fn text(error: &Error) -> String {
    texts::text(error, &NAMES)
}

/// The refusal of an `argument` that asks for `what`, which the interface has but this library does not serve.
#[cold]
pub fn not_served(argument: impl Display, what: impl Display) -> Error {
    let text = format!("{argument}: {what} is not served by this version of the library");
    Error::new(Code::InvalidUsage, text)
}

fn setting(setting: Setting) -> &'static str {
    match setting {
        Setting::Algorithm => "config.algorithm",
        Setting::Experts => "config.num_experts",
        Setting::MaxTokens => "config.max_dispatch_tokens_per_rank",
        Setting::RecvRows => "config.max_recv_tokens_per_rank",
        Setting::Overflow => "config.overflow_policy",
        Setting::RowBytes => "config.max_token_bytes",
        Setting::LlCombine => "NCCL_EP_LL_COMBINE",
        Setting::NodeSums => "NCCL_EP_NODE_SUMS",
        Setting::HtChunkBytes => "NCCL_EP_HT_CHUNK_BYTES",
    }
}

fn tensor(role: Role) -> &'static str {
    match role {
        Role::Ids | Role::IdsIn => "topk_idx",
        Role::TokensIn => "inputs.tokens",
        Role::TokensOut => "outputs.tokens",
        Role::ScalesIn => "inputs.scales",
        Role::ScalesOut => "outputs.scales",
        Role::IdsOut => "outputs.topk_idx",
        Role::WeightsIn => "inputs.topk_weights",
        // An LL combine reads a tensor that is among its outputs.
        Role::WeightsOut | Role::TokenWeights => "outputs.topk_weights",
        Role::Counter | Role::HostCounter => "layout_info.expert_counters",
    }
}

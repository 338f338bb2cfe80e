"""The library's texts in the words of `EpGroup` and `EpHandle`."""

from __future__ import annotations

from nccl_ep.errors import NcclEpError, failure

# What C calls an argument, and what it is here; the first that fits counts.
_NAMES = (
    ("config.token_size_bytes", "hidden, in bytes"),
    ("config.", ""),
    ("inputs[TOKENS]", "tokens"),
    ("outputs[TOKENS]", "out"),
    ("inputs[SCALES]", "scales"),
    ("outputs[SCALES]", "out_scales"),
    ("inputs[TOPK_IDX]", "topk_idx"),
    ("inputs[TOPK_WEIGHTS]", "topk_weights"),
    ("local_tensors[TOPK_WEIGHTS]", "topk_weights"),
    ("local_tensors[RECV_EXPERT_COUNTER_DEVICE]", "counts"),
    ("ptr: ", "tensor: "),
    (".sizes[", ".shape["),
    (".datatype", ".dtype"),
)


def in_python(error: NcclEpError, also: str = "") -> NcclEpError:
    """`error` with the names of Python's arguments, and `also` at the end of its text."""
    detail = error.detail
    for name, here in _NAMES:
        detail = detail.replace(name, here)
    return failure(error.code, error.name, detail + also)

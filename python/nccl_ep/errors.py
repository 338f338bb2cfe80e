"""The exceptions for calls that are refused or fail: `NcclEpError`, and a kind for each result."""

from __future__ import annotations

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


class NcclEpError(RuntimeError):
    """A result other than ncclSuccess.

    `code` is the ncclResult_t, `name` its text, `detail` the library's line about this refusal,
    such as "ncclEpDispatch: inputs[TOKENS]: ...", or empty.
    """

    def __init__(self, code: int, name: str, detail: str = "") -> None:
        # NCCL advises where to find details; a detail of more than a function's name has them.
        short = name.partition(" (run with ")[0] if ":" in detail else name
        result = f"NCCL error {code}, {short}"
        super().__init__(f"{detail} [{result}]" if detail else result)
        self.code = code
        self.name = name
        self.detail = detail

    def __reduce__(self) -> tuple[type[NcclEpError], tuple[int, str, str]]:
        return type(self), (self.code, self.name, self.detail)


class UnhandledCudaError(NcclEpError):
    """ncclUnhandledCudaError: a call of CUDA failed."""


class NcclSystemError(NcclEpError):
    """ncclSystemError: the operating system or an allocator failed."""


class InternalError(NcclEpError):
    """ncclInternalError: a defect of the library."""


class InvalidArgumentError(NcclEpError):
    """ncclInvalidArgument: an argument breaks a rule of its own."""


class InvalidUsageError(NcclEpError):
    """ncclInvalidUsage: the call does not fit the group, or this point of the program."""


class RemoteError(NcclEpError):
    """ncclRemoteError: another rank refused, failed, or did not answer in time."""


_KINDS: dict[int, type[NcclEpError]] = {
    1: UnhandledCudaError, 2: NcclSystemError, 3: InternalError, 4: InvalidArgumentError,
    5: InvalidUsageError, 6: RemoteError}


def failure(code: int, name: str, detail: str = "") -> NcclEpError:
    """The exception for a result."""
    return _KINDS.get(code, NcclEpError)(code, name, detail)


def in_python(error: NcclEpError, also: str = "") -> NcclEpError:
    """`error` with the names of `EpGroup` and `EpHandle` for their arguments, and `also` at the end of its text."""
    detail = error.detail
    for name, here in _NAMES:
        detail = detail.replace(name, here)
    return failure(error.code, error.name, detail + also)

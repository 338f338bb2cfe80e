"""The exception for calls that are refused or fail."""

from __future__ import annotations


class NcclEpError(RuntimeError):
    """A result other than ncclSuccess.

    `code` is the ncclResult_t, `name` its text, `detail` the library's line about this refusal,
    such as "ncclEpDispatch: inputs[TOKENS]: ...", or empty.
    """

    def __init__(self, code: int, name: str, detail: str = "") -> None:
        super().__init__(f"NCCL error {code}, {name}" + (f": {detail}" if detail else ""))
        self.code = code
        self.name = name
        self.detail = detail

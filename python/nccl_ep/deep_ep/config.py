"""`Config`, and sizes that callers ask for before they make a `Buffer`."""

from __future__ import annotations

from nccl_ep.arguments import integer

_RINGS = 32 << 20  # bytes of a high-throughput group that its ranks share
_SLOT = 320  # bytes beside a row of low latency, at most


class Config:
    """Accepted wherever DeepEP takes one; this library chooses chunks by itself.

    Nothing of it is used; `Buffer.set_num_sms` bounds the SMs of high throughput.
    """

    def __init__(self, num_sms: int = 20, num_max_nvl_chunked_send_tokens: int = 6,
                 num_max_nvl_chunked_recv_tokens: int = 256,
                 num_max_rdma_chunked_send_tokens: int = 6,
                 num_max_rdma_chunked_recv_tokens: int = 256) -> None:
        self._num_sms = integer("num_sms", num_sms, least=1)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that a group of this library shares on its node; it needs no `num_nvl_bytes`."""
        return _RINGS

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: this library sizes what it needs on the network."""
        return 0


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int) -> int:
    """Bytes of the window of a low-latency group for rows of bfloat16."""
    return 4 * num_ranks * max_tokens * (2 * hidden + _SLOT)

"""Seeded MoE problems over several ranks, and the same computation by dense torch in fp32."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


@contextlib.contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """Raises if torch makes the host wait for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As a program may set it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def captured(play: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """A CUDA graph of what has run once without one, and its results."""
    play()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, play()


def weighted(rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int,
             expert: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The sum over a row's experts in float32, of `expert(number, rows)`, which may be NaN for others' rows."""
    total = torch.zeros((), device=rows.device)
    for each in range(experts):
        factor = torch.where(ids == each, weights, 0.0).sum(dim=-1, keepdim=True)
        result = expert(each, rows)
        total = total + factor * torch.where(factor != 0, result, 0.0)
    return total


def plain(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """float32 of rows [.., H] and scales [.., S], if any: numbers, or exponents, of which an int32 has four."""
    if scales is None:
        return rows.float()
    if scales.dtype == torch.int32:
        scales = torch.stack([scales >> shift & 255 for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)
    if not scales.is_floating_point():
        scales = torch.exp2(scales.float() - 127)
    return (rows.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


@dataclasses.dataclass
class Dense:
    """The result of a dense computation: this rank's output, and the gradients."""

    output: torch.Tensor
    tokens_grad: torch.Tensor
    weights_grad: torch.Tensor
    experts_grad: torch.Tensor


class Problem:
    """Tokens of all ranks, made from one seed on every rank; the fields are this rank's part.

    An expert is a matrix [H, H] with a tanh behind it. The number of tokens differs by rank.
    """

    def __init__(self, rank: int, size: int, *, tokens: int = 9, hidden: int = 16, top_k: int = 3,
                 experts_per_rank: int = 3, dtype: torch.dtype = torch.float32, masked: bool = False,
                 repeated: bool = False, device: torch.device | str = "cpu", seed: int = 1) -> None:
        random = torch.Generator().manual_seed(seed)
        self.rank, self.size = rank, size
        self.device, self.dtype, self.hidden = torch.device(device), dtype, hidden
        self.num_experts = experts_per_rank * size
        top_k = min(top_k, self.num_experts)
        self.top_k = top_k
        self._parts = []
        for each in range(size):
            rows = 0 if masked and each == 1 else tokens + 2 * each
            part = [torch.randn((rows, hidden), generator=random).to(dtype),
                    torch.rand((rows, self.num_experts), generator=random).argsort(1)[:, :top_k],
                    torch.rand((rows, top_k), generator=random),
                    torch.randn((rows, hidden), generator=random).to(dtype)]
            if masked:
                part[1][torch.rand((rows, top_k), generator=random) < 0.3] = -1
            if repeated:
                # The last one as the first one, and of every other token all.
                part[1][:, -1] = part[1][:, 0]
                part[1][::2] = part[1][::2, :1]
            self._parts.append([tensor.to(self.device) for tensor in part])
        scale = hidden ** -0.5
        self._experts = (torch.randn((self.num_experts, hidden, hidden), generator=random)
                         * scale).to(self.device)
        self.tokens, self.topk_idx, self.weights, self.grad = (
            tensor.clone() for tensor in self._parts[rank])

    def part(self, rank: int) -> list[torch.Tensor]:
        """Tokens, ids, weights and gradients of any rank."""
        return self._parts[rank]

    def of_all(self, which: int) -> torch.Tensor:
        """Tokens, ids, weights or gradients, by their place in `part`, of all ranks in turn."""
        return torch.cat([part[which] for part in self._parts])

    def arrivals(self) -> list[tuple[int, torch.Tensor, dict[int, float]]]:
        """What comes to this rank, by source rank and token: the source, the row, weights by local experts."""
        local, found = self.num_experts // self.size, []
        for source, part in enumerate(self._parts):
            for row, ids, weights in zip(part[0], part[1].tolist(), part[2].tolist()):
                pairs = {each % local: weight for each, weight in zip(ids, weights) if each // local == self.rank}
                found += [(source, row, pairs)] if pairs else []
        return found

    def by_expert(self) -> list[list[tuple[torch.Tensor, float]]]:
        """The same by local expert: rows with their weights."""
        return [[(row, pairs[each]) for _, row, pairs in self.arrivals() if each in pairs]
                for each in range(self.num_experts // self.size)]

    @property
    def place(self) -> slice:
        """Where this rank's rows are in those of all."""
        first = sum(len(part[0]) for part in self._parts[:self.rank])
        return slice(first, first + len(self.tokens))

    @property
    def factors(self) -> torch.Tensor:
        """The sum of each token's weights, [T, 1]: what identity experts multiply it by."""
        return self.live_weights.sum(dim=1, keepdim=True)

    @property
    def live_weights(self) -> torch.Tensor:
        """The weights of experts, [T, K], 0 where there is none."""
        return torch.where(self.topk_idx >= 0, self.weights, 0.0)

    @property
    def experts(self) -> torch.Tensor:
        """How many experts each token has, [T, 1]."""
        return (self.topk_idx >= 0).sum(dim=1, keepdim=True)

    @property
    def ranks(self) -> torch.Tensor:
        """To how many ranks each token goes, [T, 1]."""
        owners = torch.where(self.topk_idx >= 0, self.topk_idx // (self.num_experts // self.size), -1)
        return sum((owners == each).any(dim=1, keepdim=True) for each in range(self.size))

    def local_experts(self, count: int) -> torch.Tensor:
        """The matrices of this rank's experts, [L, H, H], float32."""
        return self._experts[self.rank * count:(self.rank + 1) * count].clone()

    @staticmethod
    def expert(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """One expert's result, float32."""
        return torch.tanh(rows.float() @ matrix)

    def mixed(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, matrices) -> torch.Tensor:
        """Each row's experts by their local ids, weighted and summed, float32."""
        return weighted(rows, ids, weights, len(matrices), lambda each, rows: self.expert(matrices[each], rows))

    @torch.enable_grad()
    def dense(self) -> Dense:
        """Everything on one rank: each expert processes each token, mostly with weight 0."""
        experts = self._experts.clone().requires_grad_()
        mine, loss = None, torch.zeros((), device=self.device)
        for rank, (tokens, ids, weights, grad) in enumerate(self._parts):
            tokens, weights = tokens.float().requires_grad_(), weights.clone().requires_grad_()
            output = self.mixed(tokens, ids, weights, experts)
            loss = loss + (output * grad.float()).sum()
            if rank == self.rank:
                mine = tokens, weights, output
        loss.backward()
        tokens, weights, output = mine
        return Dense(output.detach(), tokens.grad, weights.grad, experts.grad)

    def backward(self, output: torch.Tensor, retain_graph: bool = False) -> None:
        """The backward of an output whose gradient is this rank's. By a loss: for one torch loads its compiler."""
        (output.float() * self.grad.float()).sum().backward(retain_graph=retain_graph)

    def check(self, output: torch.Tensor, experts: torch.Tensor | None = None) -> None:
        """The output, and the gradients of tokens, weights and local experts that it left, are those of `dense`."""
        want = self.dense()
        self.close(output, want.output)
        self.close(self.tokens.grad, want.tokens_grad)
        self.close(self.weights.grad, want.weights_grad)
        if experts is not None:
            self.close(experts.grad, want.experts_grad[self.rank * len(experts):][:len(experts)])

    def gradients(self, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of tokens and weights, if that of this output is this rank's."""
        return torch.autograd.grad((output.float() * self.grad.float()).sum(), (self.tokens, self.weights))

    def same(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Two outputs, and the gradients of tokens and weights."""
        for have, right in zip((got, *self.gradients(got)), (want, *self.gradients(want))):
            self.close(have, right)

    def close(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Equal up to the rounding of the tokens' type."""
        limit = 2e-5 if self.dtype == torch.float32 else 5e-2
        torch.testing.assert_close(got.float(), want.float(), rtol=limit, atol=limit)

"""A Mixture-of-Experts layer on EPAll2AllLayer, compared with a dense computation.

Rows arrive sorted by expert, so that each expert works on one block, as grouped GEMMs want it.

    mpirun -np 4 python3 examples/python/04_moe_layer.py
"""

import torch

from nccl_ep.layers import EPAll2AllLayer
from start import finish, start

EXPERTS_PER_RANK, HIDDEN, TOKENS, TOP_K = 4, 64, 32, 3


class MoE(torch.nn.Module):
    """A router, and this rank's experts: HIDDEN -> 2 HIDDEN -> HIDDEN."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__()
        self.experts = EXPERTS_PER_RANK * size
        # The same numbers on every rank, so that any rank can compute all experts.
        random = torch.Generator().manual_seed(5)
        self.router = torch.randn(HIDDEN, self.experts, generator=random).to(device)
        self.up = (torch.randn(self.experts, HIDDEN, 2 * HIDDEN, generator=random) / 8).to(device)
        self.down = (torch.randn(self.experts, 2 * HIDDEN, HIDDEN, generator=random) / 8).to(device)
        self.first = rank * EXPERTS_PER_RANK
        self.layer = EPAll2AllLayer(None, TOKENS, HIDDEN, TOP_K, rank, self.experts, size, size,
                                    dtype=torch.float32)

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids [T, K]."""
        weights, ids = (tokens @ self.router).softmax(dim=1).topk(TOP_K, dim=1)
        return weights, ids

    def expert(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """One expert's result for rows [n, HIDDEN]."""
        return torch.relu(rows @ self.up[number]) @ self.down[number]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Each token's experts, on whatever rank: [T, HIDDEN]."""
        weights, ids = self.route(tokens)
        rows, factors, layout = self.layer.dispatch(tokens, ids.to(torch.int32), weights)
        blocks = rows.split(layout.num_recv_tokens_per_expert_list)
        results = torch.cat([self.expert(self.first + number, block)
                             for number, block in enumerate(blocks)])
        return self.layer.combine(results * factors.unsqueeze(1), layout)

    def dense(self, tokens: torch.Tensor) -> torch.Tensor:
        """The same without communication."""
        weights, ids = self.route(tokens)
        output = torch.zeros_like(tokens)
        for number in range(self.experts):
            factor = torch.where(ids == number, weights, 0.0).sum(dim=1, keepdim=True)
            output = output + factor * self.expert(number, tokens)
        return output


def main() -> None:
    rank, size, device = start()
    model = MoE(rank, size, device)
    tokens = torch.randn(TOKENS + rank, HIDDEN, device=device, requires_grad=True)
    output = model(tokens)
    torch.testing.assert_close(output, model.dense(tokens), rtol=1e-3, atol=1e-4)

    output.square().sum().backward()
    through_layer, tokens.grad = tokens.grad, None
    model.dense(tokens).square().sum().backward()
    torch.testing.assert_close(through_layer, tokens.grad, rtol=1e-3, atol=1e-3)
    model.layer.finalize()
    finish(rank, f"{model.experts} experts on {size} ranks, output and gradients as dense")


if __name__ == "__main__":
    main()

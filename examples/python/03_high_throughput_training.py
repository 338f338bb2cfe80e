"""High throughput with gradients: one step of training a router and its experts.

A dispatch's gradient is a combine and the other way round; autograd calls them.

    mpirun -np 4 python3 examples/python/03_high_throughput_training.py
"""

import torch

from nccl_ep import EpGroup
from nccl_ep.autograd import ht_combine, ht_dispatch
from start import finish, start

EXPERTS_PER_RANK, HIDDEN, TOKENS, TOP_K, STEPS = 2, 32, 48, 2, 20


def main() -> None:
    rank, size, device = start()
    experts = EXPERTS_PER_RANK * size
    tokens = torch.randn(TOKENS, HIDDEN, device=device)
    wanted = tokens.roll(1, dims=1)
    router = torch.nn.Linear(HIDDEN, experts, device=device)
    local = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN, device=device)
                                for _ in range(EXPERTS_PER_RANK))
    # A real model also averages the router's gradients over the ranks; here each rank has its own.
    optimizer = torch.optim.Adam([*router.parameters(), *local.parameters()], lr=1e-2)

    losses = []
    with EpGroup(experts, HIDDEN, algorithm="ht", dtype=torch.float32) as group:
        for _ in range(STEPS):
            weights, ids = router(tokens).softmax(dim=1).topk(TOP_K, dim=1)
            handle = group.create_handle(ids)
            received, local_ids, factors = ht_dispatch(handle, tokens, weights)
            # A token arrives once per rank, with the weights of its experts there.
            result = torch.zeros_like(received)
            for number, expert in enumerate(local):
                factor = torch.where(local_ids == number, factors, 0.0).sum(dim=1, keepdim=True)
                result = result + factor * expert(received)
            output = ht_combine(handle, result)
            loss = (output - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    assert router.weight.grad is not None and router.weight.grad.abs().sum() > 0
    assert losses[-1] < 0.8 * losses[0], losses
    finish(rank, f"loss on rank 0 went from {losses[0]:.3f} to {losses[-1]:.3f} in {STEPS} steps")


if __name__ == "__main__":
    main()

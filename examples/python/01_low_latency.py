"""Low latency: a few tokens to their experts and back, as when a model generates text.

Dispatch puts the tokens of each local expert side by side; combine weighs and sums the results.

    mpirun -np 4 python3 examples/python/01_low_latency.py
"""

import torch

from nccl_ep import EpGroup
from start import finish, start

EXPERTS_PER_RANK, HIDDEN, TOKENS, TOP_K = 2, 256, 16, 2


def main() -> None:
    rank, size, device = start()
    experts = EXPERTS_PER_RANK * size
    tokens = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    scores = torch.randn(TOKENS, experts, device=device).softmax(dim=1)
    weights, ids = scores.topk(TOP_K, dim=1)

    with EpGroup(experts, HIDDEN, algorithm="ll", max_tokens_per_rank=TOKENS) as group:
        with group.create_handle(ids) as handle:
            received = handle.dispatch(tokens)
            # Global expert number g multiplies by g + 1. Combine reads the first counts[e] rows of
            # expert e.
            first = rank * EXPERTS_PER_RANK
            factors = torch.arange(first + 1, first + 1 + EXPERTS_PER_RANK, device=device)
            results = received.tokens * factors.to(torch.bfloat16).view(-1, 1, 1)
            output = handle.combine(results, weights)

    # The same on one rank: each expert's result is its factor times the token.
    expected = torch.zeros(TOKENS, HIDDEN, device=device)
    for k in range(TOP_K):
        result = tokens * (ids[:, k:k + 1] + 1).to(torch.bfloat16)
        expected += weights[:, k:k + 1] * result.float()
    torch.testing.assert_close(output, expected.to(torch.bfloat16), rtol=2e-2, atol=2e-2)
    finish(rank, f"{TOKENS} tokens on each of {size} ranks went to {TOP_K} experts and back")


if __name__ == "__main__":
    main()

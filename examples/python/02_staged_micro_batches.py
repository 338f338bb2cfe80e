"""Staged operations: send, compute something else, then receive.

Two micro-batches take turns: while the tokens of one are on their way, the other's experts work.

    mpirun -np 4 python3 examples/python/02_staged_micro_batches.py
"""

import torch

from nccl_ep import EpGroup
from start import finish, start

HIDDEN, TOKENS = 128, 8


def main() -> None:
    rank, size, device = start()
    batches = [torch.randn(TOKENS, HIDDEN, device=device) for _ in range(2)]
    weights = torch.ones(TOKENS, 1, device=device)
    # One expert on each rank; the batches travel in opposite directions.
    routes = [torch.full((TOKENS, 1), (rank + step) % size, device=device)
              for step in (1, size - 1)]

    with EpGroup(size, HIDDEN, max_tokens_per_rank=TOKENS, dtype=torch.float32) as group:
        handles = [group.create_handle(route) for route in routes]
        sent = [handles[0].dispatch(batches[0], send_only=True)]
        sent.append(handles[1].dispatch(batches[1], send_only=True))
        outputs = []
        for handle, received in zip(handles, sent):
            handle.complete()
            # The other batch's tokens arrive while this expert works.
            result = received.tokens * (rank + 1)
            outputs.append(handle.combine(result, weights, send_only=True))
        for handle in handles:
            handle.complete()
            handle.close()

    for batch, route, output in zip(batches, routes, outputs):
        torch.testing.assert_close(output, batch * (route + 1))
    finish(rank, f"2 micro-batches on {size} ranks, both in flight at once")


if __name__ == "__main__":
    main()

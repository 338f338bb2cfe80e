"""FP8 in low latency: tokens arrive as e4m3 with scales and go into block-scaled matrix products.

Dispatch rounds the tokens while it sends them, and writes their scales by columns, as the products
of Hopper GPUs read them: nothing is needed in between. Elsewhere rows are multiplied by their
scales first.

    mpirun -np 4 python3 examples/python/06_block_scaled_matmul.py
"""

import torch
from torch.nn import functional

from nccl_ep import EpGroup
from start import finish, start

# Torch wants scales without padding: an expert's slots, M * R, and a row's blocks are multiples of
# 4.
EXPERTS_PER_RANK, HIDDEN, TOKENS, TOP_K, BLOCK = 2, 512, 32, 2, 128
E4M3 = torch.float8_e4m3fn
# Rounding moves an element of a token or a weight by at most 1/16 of itself. The errors of both are
# independent, so their squares add up.
BOUND = 2**0.5 / 16


def has_block_scaled_products(device: torch.device) -> bool:
    """Whether torch multiplies blocks of 1 x 128 by blocks of 128 x 128: Hopper, CUDA 12.9."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    toolkit = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return (hasattr(functional, "scaled_mm") and toolkit >= (12, 9)
            and torch.cuda.get_device_capability(device)[0] == 9)


class Expert:
    """A matrix [HIDDEN, HIDDEN] in e4m3, with a float32 scale for each block of 128 x 128."""

    def __init__(self, weight: torch.Tensor) -> None:
        blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / torch.finfo(E4M3).max
        self.weight = (blocks / scales).view_as(weight).to(E4M3)
        self.scales = scales[:, 0, :, 0]
        self.is_block_scaled = has_block_scaled_products(weight.device)

    def __call__(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """bfloat16 [n, HIDDEN], for e4m3 rows [n, HIDDEN] with scales [n, HIDDEN / 128]."""
        if self.is_block_scaled:
            recipe = functional.ScalingType
            return functional.scaled_mm(
                rows, self.weight.t(), scales, recipe.BlockWise1x128, self.scales.t(),
                recipe.BlockWise128x128, output_dtype=torch.bfloat16)
        wide = rows.float() * scales.repeat_interleave(BLOCK, dim=1)
        factors = self.scales.repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
        return (wide @ (self.weight.float() * factors).t()).to(torch.bfloat16)


def dense(tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
          matrices: torch.Tensor) -> torch.Tensor:
    """The same in float32, without rounding and communication."""
    output = torch.zeros_like(tokens, dtype=torch.float32)
    for number, matrix in enumerate(matrices):
        factor = torch.where(ids == number, weights, 0.0).sum(dim=1, keepdim=True)
        output += factor * (tokens.float() @ matrix.t())
    return output


def main() -> None:
    rank, size, device = start()
    experts = EXPERTS_PER_RANK * size
    # Blocks of different size, so that a scale at a wrong place shows.
    sizes = torch.exp2(torch.randint(-4, 5, (TOKENS, HIDDEN // BLOCK))).repeat_interleave(BLOCK, 1)
    tokens = (torch.randn(TOKENS, HIDDEN) * sizes).to(device, torch.bfloat16)
    weights, ids = torch.randn(TOKENS, experts, device=device).softmax(dim=1).topk(TOP_K, dim=1)
    # The same numbers on every rank, so that any rank can compute all experts.
    random = torch.Generator().manual_seed(6)
    matrices = torch.randn(experts, HIDDEN, HIDDEN, generator=random).to(device) / HIDDEN**0.5
    local = [Expert(each) for each in matrices.unflatten(0, (size, -1))[rank]]

    with EpGroup(experts, HIDDEN, algorithm="ll", max_tokens_per_rank=TOKENS) as group:
        with group.create_handle(ids) as handle:
            received = handle.dispatch(tokens, cast="fp8", scales_order="column")
            assert received.tokens.dtype == E4M3 and received.scales is not None
            # From counts[e] on rows hold anything; combine does not read their results.
            results = torch.stack([expert(rows, scales) for expert, rows, scales
                                   in zip(local, received.tokens, received.scales)])
            output = handle.combine(results, weights)

    expected = dense(tokens, ids, weights, matrices)
    difference = (output.float() - expected).norm(dim=1)
    error = float((difference / expected.norm(dim=1)).max())  # of the worst token
    assert error <= BOUND, f"relative error {error:.4f}, bound {BOUND:.4f}"
    product = "block-scaled" if local[0].is_block_scaled else "dequantised"
    finish(rank, f"{experts} experts on {size} ranks, {product} products, relative error "
                 f"{error:.4f}, bound {BOUND:.4f}")


if __name__ == "__main__":
    main()

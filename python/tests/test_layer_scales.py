"""EPAll2AllLayer with rows that have scales: forwarded and cast, against the formula in torch."""

import functools

import pytest
import torch

from problems import Problem
from test_layer import pairs_of, reversing

pytestmark = [pytest.mark.high_throughput, pytest.mark.usefixtures("poisoned")]

_HIDDEN = 272  # blocks of 128 and of 32 elements, the last of 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_BLOCKS = {"fp8": 128, "fp8_pow2": 128, "ue8m0": 128, "ue8m0_packed": 128, "mxfp8": 32}


@pytest.fixture
def scaled(layered):
    return functools.partial(layered, hidden=_HIDDEN, dtype=torch.bfloat16)


def quantised(tokens: torch.Tensor, cast: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and scales of docs/formats.md, computed on the CPU."""
    block, device = _BLOCKS[cast], tokens.device
    wide = torch.nn.functional.pad(tokens.float().cpu(), (0, -tokens.shape[1] % block))
    blocks = wide.unflatten(1, (-1, block))
    largest = blocks.abs().amax(dim=2).clamp(min=torch.tensor(1e-4))
    scales = largest * torch.tensor(1 / 448)
    # `448 / largest` is a product with the reciprocal.
    factors = torch.div(torch.tensor(448.0), largest)
    if cast != "fp8":
        mantissas, exponents = torch.frexp(scales)
        exponents = exponents - (mantissas == 0.5).to(torch.int32)
        scales, factors = torch.exp2(exponents.float()), torch.exp2(-exponents.float())
    rows = (blocks * factors.unsqueeze(2)).to(torch.float8_e4m3fn)
    if not cast.startswith("fp8"):
        scales = (exponents + 127).to(torch.uint8)
    if cast == "ue8m0_packed":
        scales = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4)).view(torch.int32)
    return rows.flatten(1)[:, :tokens.shape[1]].contiguous().to(device), scales.to(device)


def dequantised(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows with a float32 scale for 128 elements, as float32."""
    return rows.float() * scales.repeat_interleave(128, dim=1)[:, :rows.shape[1]]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    bits = _BITS[want.dtype.itemsize]
    return got.dtype == want.dtype and torch.equal(got.view(bits), want.view(bits))


def tokens_here(ep, problem: Problem) -> list[int]:
    """The number over all ranks of each row's token."""
    return [token for expert, token, _ in pairs_of(problem) if expert // ep.num_experts_per_rank == problem.rank]


def check(rows: torch.Tensor, layout, tokens: torch.Tensor, cast: str = "fp8") -> None:
    """Rows and scales are those of the tokens."""
    want_rows, want_scales = quantised(tokens, cast)
    assert same_bits(rows, want_rows) and same_bits(layout.scales, want_scales)


@pytest.mark.parametrize("order", ["row", "column"])
@pytest.mark.parametrize("cast", _BLOCKS)
def test_cast_rows_by_expert(scaled, cast, order):
    problem, ep = scaled(masked=True)
    rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights,
                                        cast=cast, scales_order=order)
    here = tokens_here(ep, problem)
    check(rows, layout, problem.of_all(0)[here], cast)
    step = 16 // layout.scales.element_size()
    pitch = -(-max(len(here), 1) // step) * step
    assert order == "row" or layout.scales.stride() == (1, pitch)
    _, plain_weights, _ = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights)
    assert torch.equal(weights, plain_weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cast_of_other_types_than_the_layers(scaled, dtype):
    problem, ep = scaled()
    rows, _, layout = ep.dispatch((problem.tokens / 3).to(dtype), problem.topk_idx, cast="fp8")
    tokens = (problem.of_all(0) / 3).to(dtype)
    check(rows, layout, tokens[tokens_here(ep, problem)])


@pytest.mark.parametrize("place", ["dense", "pitch", "columns", "neither"])
def test_forwarded_rows_by_expert(scaled, place):
    problem, ep = scaled()
    rows, scales = quantised(problem.tokens, "fp8")
    memory = {"dense": scales, "pitch": torch.cat([scales, -scales], dim=1)[:, :3],
              "columns": scales.t().contiguous().t(),
              "neither": torch.stack([scales, -scales], dim=2)[:, :, 0]}[place]
    assert torch.equal(memory, scales)
    got, weights, layout = ep.dispatch(rows, problem.topk_idx, scales=memory)
    assert weights is None
    check(got, layout, problem.of_all(0)[tokens_here(ep, problem)])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.uint16, torch.uint32])
def test_scales_of_any_type(scaled, dtype):
    """Of 1, 2 or 4 bytes, which come as they are."""
    problem, ep = scaled()
    bits = problem.of_all(0).view(torch.uint8)[:, :16] & 1
    rows, _, layout = ep.dispatch(problem.tokens[:, 16:32].contiguous(), problem.topk_idx,
                                  scales=bits[problem.place].contiguous().view(dtype))
    here = tokens_here(ep, problem)
    assert torch.equal(rows, problem.of_all(0)[here][:, 16:32])
    assert same_bits(layout.scales, bits[here].view(dtype))


def test_packed_rows_are_forwarded(scaled):
    """As NVFP4: two numbers in a byte, an e4m3 scale for 16; all bytes that there are."""
    problem, ep = scaled()
    tokens = problem.of_all(0)
    packed = tokens.view(torch.uint8)[:, :_HIDDEN // 2]
    scales = tokens.view(torch.uint8)[:, 20:20 + _HIDDEN // 16].view(torch.float8_e4m3fn)
    packed, scales = (torch.nn.functional.pad(packed, (0, 8)), scales)
    rows, _, layout = ep.dispatch(packed[problem.place], problem.topk_idx, scales=scales[problem.place])
    here = tokens_here(ep, problem)
    assert same_bits(rows, packed[here])
    assert same_bits(layout.scales, scales.view(torch.uint8)[here].view(torch.float8_e4m3fn))


def test_ranks_that_cast_and_ranks_that_forward(scaled, rank):
    problem, ep = scaled()
    if rank % 2:
        rows, scales = quantised(problem.tokens, "fp8")
        got, _, layout = ep.dispatch(rows, problem.topk_idx, scales=scales)
    else:
        got, _, layout = ep.dispatch(problem.tokens, problem.topk_idx, cast="fp8")
    check(got, layout, problem.of_all(0)[tokens_here(ep, problem)])


def test_given_scatter_indices_decide_the_order_of_scales(scaled):
    problem, ep = scaled()
    rows, _, layout = ep.dispatch(problem.tokens, problem.topk_idx, cast="fp8", full_scatter_indices=reversing(problem))
    here = sorted(pairs_of(problem), key=lambda pair: (pair[0], -pair[1]))
    check(rows, layout, problem.of_all(0)[[token for expert, token, _ in here
                                           if expert // ep.num_experts_per_rank == problem.rank]])


def test_combine_after_a_cast(scaled, device):
    """Results go home in the layer's dtype; experts behind the dispatch have gradients."""
    problem, ep = scaled()
    rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights,
                                        cast="fp8")
    expert = torch.tensor(2.0, device=device, requires_grad=True)
    weighted = dequantised(rows, layout.scales) * weights.unsqueeze(1)
    output = ep.combine(weighted * expert, layout)
    own = dequantised(*quantised(problem.tokens, "fp8"))
    assert output.dtype == torch.bfloat16
    problem.close(output, 2 * own * problem.factors)
    output.sum().backward()
    torch.testing.assert_close(expert.grad, weighted.sum(), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="input: has type torch.float8_e4m3fn; rows are summed"):
        ep.combine(rows, layout)


@pytest.mark.parametrize("cast, order", [(None, "row"), ("mxfp8", "row"), ("mxfp8", "column")])
def test_no_rows_anywhere(scaled, cast, order):
    """Neither without tokens, nor where no token has an expert."""
    problem, ep = scaled()
    for tokens in (0, len(problem.tokens)):
        rows, weights, layout = ep.dispatch(
            problem.tokens[:tokens], torch.full_like(problem.topk_idx[:tokens], -1),
            problem.weights[:tokens], cast=cast, scales_order=order)
        assert rows.shape == (0, _HIDDEN) and weights.shape == (0,)
        assert cast is None or rows.dtype == torch.float8_e4m3fn and layout.scales.shape == (0, 9)
        output = ep.combine(rows.to(torch.bfloat16), layout)
        assert torch.equal(output, torch.zeros_like(problem.tokens[:tokens]))


def test_what_makes_no_sense_is_refused(scaled):
    """On this rank alone, before others wait for it: the layer works afterwards."""
    problem, ep = scaled()
    tokens, (rows, scales) = problem.tokens, quantised(problem.tokens, "fp8")
    for input, arguments, text in (
            (tokens, dict(cast="int4"), "cast: must be one of fp8,"),
            (tokens, dict(cast=["fp8"]), "cast: must be one of fp8,"),
            (tokens, dict(cast="fp8", scales=scales), "cast: rows that have scales"),
            (rows, dict(cast="fp8"), "input: has type torch.float8_e4m3fn, but a cast takes"),
            (rows, {}, "input: has type torch.float8_e4m3fn, expected torch.bfloat16"),
            (rows, dict(scales=scales[1:]), "scales: has shape"),
            (rows, dict(scales=scales[:, 0]), "scales: has shape"),
            (rows, dict(scales=scales.to("meta")), "scales: is on meta"),
            (rows, dict(scales=[1.0]), "scales: must be a tensor, not list"),
            (rows, dict(scales=scales.double()), "scales: has type torch.float64, expected one"),
            (rows.view(torch.bool), dict(scales=scales), "no element type for torch.bool"),
            (rows[:, 8:], dict(scales=scales), "has 264 bytes, expected a positive multiple of 16"),
            (tokens, dict(scales=scales), r"have 544 \+ 12 bytes, more than a row of the layer"),
            (tokens[:, 16:], dict(cast="fp8"), "input: has shape"),
            (tokens, dict(scales_order="tiles"), "scales_order: must be row or column"),
            (tokens, dict(cast="fp8", scales_order="tiles"), "scales_order: must be")):
        with pytest.raises((TypeError, ValueError), match=text):
            ep.dispatch(input, problem.topk_idx, **arguments)
    for input, arguments in (
            (tokens.clone().requires_grad_(), dict(cast="fp8")),
            (tokens, dict(cast="fp8", weight=problem.weights.clone().requires_grad_())),
            (rows, dict(scales=scales.clone().requires_grad_()))):
        with pytest.raises(RuntimeError, match="rows with scales have none"):
            ep.dispatch(input, problem.topk_idx, **arguments)
    with torch.no_grad():
        got, _, layout = ep.dispatch(tokens.clone().requires_grad_(), problem.topk_idx, cast="fp8")
    assert got.dtype == torch.float8_e4m3fn and not layout.scales.requires_grad
    _, _, layout = ep.dispatch(tokens, problem.topk_idx)
    assert layout.scales is None


@torch.no_grad()
def test_small_batches_of_all_sizes(scaled, world, device):
    """In low latency; more sizes than handles, so that handles serve other sizes than before."""
    most = 10 + 2 * world[1]
    _, ep = scaled(latency_tokens=most, tokens=1)
    for tokens in (*range(1, 11), 3, 9, 1):
        problem = Problem(*world, device=device, tokens=tokens, hidden=_HIDDEN, dtype=torch.bfloat16)
        rows, scales = quantised(problem.tokens, "fp8")
        got, weights, layout = ep.dispatch(rows, problem.topk_idx, problem.weights, scales=scales)
        assert len(got) == ep.latency_rows and torch.equal(weights, torch.ones_like(weights))
        values = dequantised(got, layout.scales).to(torch.bfloat16).unflatten(0, (ep.num_experts_per_rank, -1))
        for rows_of_expert, count in zip(values, layout.num_recv_tokens_per_expert.tolist()):
            rows_of_expert[count:] = 0
        sums = ep.combine(values.flatten(0, 1), layout)
        problem.close(sums, dequantised(rows, scales) * problem.weights.sum(1, keepdim=True))

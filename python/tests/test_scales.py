"""Dispatches of rows with scales: forwarded in any order, and cast, compared with torch."""

import pytest
import torch

from problems import plain
from test_group import expected_slots

_HIDDEN = 512  # four blocks of 128


@pytest.mark.parametrize("cast", ["fp8", "fp8_pow2", "ue8m0", "ue8m0_packed", "mxfp8"])
@pytest.mark.parametrize("order", ["row", "column"])
def test_low_latency_casts(opened, cast, order):
    problem, ep, handle = opened("ll", hidden=_HIDDEN, dtype=torch.bfloat16)
    with handle:
        received = handle.dispatch(problem.tokens, cast=cast, scales_order=order)
        assert received.tokens.dtype == torch.float8_e4m3fn
        if received.scales.shape[-1] > 1:
            assert (received.scales.stride(-2) == 1) == (order == "column")
        for local in range(ep.num_local_experts):
            want = expected_slots(problem, local).float()
            got = plain(received.tokens[local, :len(want)], received.scales[local, :len(want)])
            assert torch.all((got - want).abs() <= want.abs() / 16 + want.abs().amax() * 2**-18)
        handle.combine(plain(received.tokens, received.scales).to(torch.bfloat16), problem.weights)


@pytest.mark.parametrize("order", ["row", "column"])
def test_high_throughput_forwards_scales(opened, order):
    problem, _, handle = opened("ht", hidden=_HIDDEN)
    rows = problem.tokens.to(torch.float8_e4m3fn)
    scales = problem.tokens[:, :3]  # with a pitch
    with handle:
        received = handle.dispatch(rows, problem.weights, scales=scales, scales_order=order)
        plain = handle.dispatch(problem.tokens, problem.weights)
    assert torch.equal(received.tokens.view(torch.uint8),
                       plain.tokens.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(received.scales, plain.tokens[:, :3])
    assert torch.equal(received.topk_idx, plain.topk_idx)


@pytest.mark.parametrize("order", ["row", "column"])
def test_low_latency_forwards_scales(opened, order):
    problem, ep, handle = opened("ll", hidden=_HIDDEN)
    with handle:
        received = handle.dispatch(problem.tokens.to(torch.float8_e4m3fn),
                                   scales=problem.tokens[:, :3], scales_order=order)
        for local in range(ep.num_local_experts):
            want = expected_slots(problem, local)
            rows = received.tokens[local, :len(want)]
            assert torch.equal(rows.float(), want.to(torch.float8_e4m3fn).float())
            assert torch.equal(received.scales[local, :len(want)], want[:, :3])


@pytest.mark.high_throughput
def test_scales_go_to_memory_of_the_caller(opened, device):
    problem, _, handle = opened("ht", hidden=_HIDDEN, dtype=torch.bfloat16)
    with handle:
        plain = handle.dispatch(problem.tokens, problem.weights, cast="fp8")
        rows = len(plain.scales)
        memory = torch.full((_HIDDEN // 128, rows + 3), -1.0, device=device)
        place = memory[:, :rows].t()  # columns, with a pitch
        received = handle.dispatch(problem.tokens, problem.weights, cast="fp8", out_scales=place)
    assert received.scales is place and rows > 0
    assert torch.equal(place, plain.scales)
    assert torch.all(memory[:, rows:] == -1)


def test_what_makes_no_sense_is_refused(opened, device):
    problem, _, handle = opened("ll", hidden=_HIDDEN, dtype=torch.bfloat16)
    scales = torch.ones((len(problem.tokens), 2), device=device)
    with handle:
        for arguments, text in [(dict(cast="int4"), "cast: must be one of fp8,"),
                                (dict(cast="fp8", scales=scales), "cast: rows that have scales"),
                                (dict(scales=scales[:-1]), "scales: has shape"),
                                (dict(out_scales=scales), "out_scales: needs scales or cast"),
                                (dict(cast="fp8", scales_order="tiles"), "scales_order: must be")]:
            with pytest.raises(ValueError, match=text):
                handle.dispatch(problem.tokens, **arguments)
        for tokens, arguments in [(problem.tokens.clone().requires_grad_(), dict(cast="fp8")),
                                  (problem.tokens, dict(scales=scales.clone().requires_grad_()))]:
            with pytest.raises(RuntimeError, match="no gradients"):
                handle.dispatch(tokens, **arguments)

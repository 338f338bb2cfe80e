"""From received tokens to rows by expert and back, against loops; nothing waits for the GPU."""

import pytest
import torch

from nccl_ep import runtime
from nccl_ep.layers import expand, layout, rows
from nccl_ep.routing import pairs_of_ids, stable_sort
from problems import without_waiting

EXPERTS, HIDDEN = 3, 16


@pytest.fixture
def ids(device):
    """Local ids as a dispatch delivers them: ascending, then -1; the last row is unused."""
    rows = [[0, 2, -1, -1], [1, -1, -1, -1], [0, 1, 2, -1], [-1] * 4, [2, -1, -1, -1], [-1] * 4]
    return torch.tensor(rows, device=device)


def pairs_of(ids: torch.Tensor) -> list[tuple[int, int, int]]:
    """(expert, token, column), as rows are sorted."""
    return sorted((expert, token, column) for token, row in enumerate(ids.tolist())
                  for column, expert in enumerate(row) if expert >= 0)


@pytest.mark.parametrize("columns", [4, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_sums(ids, device, dtype, columns):
    ids = ids[:, :columns]
    tokens = torch.randn((len(ids), HIDDEN), device=device).to(dtype).requires_grad_()
    weights = torch.rand(ids.shape, device=device)
    with without_waiting(device):
        expansion = expand.by_expert(ids, 7, EXPERTS)
        spread = expand.expand(tokens, expansion)
        factors = expand.weight_of_row(weights, expansion, EXPERTS)
        sums = expand.reduce(spread * factors.unsqueeze(1).to(dtype), expansion)
        sums.sum().backward()

    pairs = pairs_of(ids)
    assert torch.equal(spread, tokens[[token for _, token, _ in pairs]])
    assert torch.equal(factors, weights[[each[1] for each in pairs], [each[2] for each in pairs]])
    want = torch.zeros((len(ids), HIDDEN), device=device)
    gradient = torch.zeros((len(ids), 1), device=device)
    for (_, token, _), factor, row in zip(pairs, factors.to(dtype), spread.detach()):
        want[token] += (row * factor).float()
        gradient[token] += factor.float()
    # Summed in fp32 and rounded once.
    torch.testing.assert_close(sums, want.to(dtype))
    torch.testing.assert_close(tokens.grad, gradient.to(dtype).expand(-1, HIDDEN))


@pytest.mark.parametrize("hidden", [16, 1500, 7168])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_do_what_torch_does(device, dtype, hidden):
    """The Triton kernels, if available, on rows that fill no whole block and on others."""
    if device.type != "cuda" or rows.triton_kernels(device) is None:
        pytest.skip("no Triton, or no GPU")
    experts, top_k = 5, 8
    scores = torch.rand((70, experts), device=device)
    chosen = torch.where(scores < 0.6, torch.arange(experts, device=device), experts)
    ids = torch.full((70, top_k), -1, device=device)
    ascending = chosen.sort(dim=1).values
    ids[:, :experts] = ascending.masked_fill(ascending == experts, -1)
    expansion = expand.by_expert(ids, int((ids >= 0).sum()), experts)
    tokens = torch.randn((70, hidden), device=device).to(dtype)
    spread = rows.spread(tokens, expansion)
    assert torch.equal(spread, rows.spread_by_torch(tokens, expansion))
    parts = torch.randn_like(spread)
    torch.testing.assert_close(rows.add_up(parts, expansion),
                               rows.add_up_by_torch(parts, expansion))
    # Rows that are slices of wider ones are made dense first.
    wider = torch.randn((70, hidden + 8), device=device).to(dtype)[:, 8:]
    assert torch.equal(rows.spread(wider, expansion), rows.spread_by_torch(wider, expansion))


def test_gradients_of_gradients(ids, device):
    """By reverse mode, forward mode and a batch, against indexing by torch."""
    expansion = expand.by_expert(ids, 7, EXPERTS)
    matrix = torch.randn((HIDDEN, HIDDEN), device=device)
    tokens, along = torch.randn((2, len(ids), HIDDEN), device=device)

    def ours(tokens):
        return expand.reduce((expand.expand(tokens, expansion) @ matrix).tanh(), expansion)

    def plain(tokens):
        rows = (tokens[expansion.source] @ matrix).tanh()
        return torch.zeros_like(tokens).index_add(0, expansion.source, rows)

    def same(make):
        for have, want in zip(make(ours), make(plain), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)

    same(lambda layer: torch.autograd.functional.hvp(lambda tokens: layer(tokens).square().sum(), tokens, along))
    same(lambda layer: torch.func.jvp(layer, (tokens,), (along,)))
    same(lambda layer: torch.func.vmap(layer)(torch.stack([tokens, along])))
    same(lambda layer: torch.func.jvp(torch.func.grad(lambda tokens: layer(tokens).sum()), (tokens,), (along,)))


def test_memory_is_kept_for_the_stream_that_uses_it(ids, device, monkeypatch):
    """Of a layout, which a dispatch has made on a stream of its own, by all that combines and backwards read."""
    noted = set()
    for module in (layout, rows):
        monkeypatch.setattr(module, "kept", lambda each: noted.add(each.data_ptr()) or runtime.kept(each))
    expansion = expand.by_expert(ids, 7, EXPERTS)
    tokens = torch.ones((len(ids), HIDDEN), device=device, requires_grad=True)
    expand.reduce(expand.expand(tokens, expansion), expansion).sum().backward()
    used = [expansion.slots, *vars(expansion).get("bags", ())]
    if "source" in vars(expansion):
        used += expansion.source, expansion.pair
    assert noted == {each.data_ptr() for each in used}


def test_no_rows(device):
    ids = torch.full((2, 4), -1, device=device)
    expansion = expand.by_expert(ids, 0, EXPERTS)
    rows = expand.expand(torch.ones((2, HIDDEN), device=device), expansion)
    assert rows.shape == (0, HIDDEN)
    assert torch.equal(expand.reduce(rows, expansion), torch.zeros((2, HIDDEN), device=device))
    nothing = expand.by_expert(ids[:0], 0, EXPERTS)
    assert expand.reduce(rows, nothing).shape == (0, HIDDEN)


def test_given_positions(ids, device):
    """Each expert's rows in reverse; then invalid orders."""
    pairs = pairs_of(ids)
    backwards = sorted(pairs, key=lambda pair: (pair[0], -pair[1]))
    positions = torch.zeros_like(ids)
    for number, (_, token, column) in enumerate(backwards):
        positions[token, column] = number
    expansion = expand.by_expert(ids, 7, EXPERTS, positions)
    assert expansion.source.tolist() == [token for _, token, _ in backwards]
    tokens = torch.randn((len(ids), HIDDEN), device=device)
    counts = (ids >= 0).sum(dim=1, keepdim=True)
    sums = expand.reduce(expand.expand(tokens, expansion), expansion)
    torch.testing.assert_close(sums, tokens * counts)
    for wrong in (positions + 1, positions - 1, positions.clamp(max=5), 6 - positions):
        with pytest.raises(ValueError, match="full_scatter_indices"):
            expand.by_expert(ids, 7, EXPERTS, wrong)


def test_ids_that_are_no_pair(device):
    given = torch.tensor([[5, 1, -1, 3], [2, 2, 0, 9], [-1, -1, -1, 4], [6, 6, -9, 6]],
                         dtype=torch.int32, device=device)
    want = [[5, 1, 9, 3], [9, 2, 0, 9], [9, 9, 9, 4], [9, 9, 9, 6]]
    before = given.clone()
    assert pairs_of_ids(given, 9).tolist() == want
    far = torch.where(given < 0, torch.iinfo(torch.int64).min, given.long())
    assert pairs_of_ids(far, 9).tolist() == want and torch.equal(given, before)


@pytest.mark.parametrize("most", [3, 255, 256, 40000])
def test_sorting_keeps_the_order_of_equal_keys(device, most):
    keys = torch.tensor([most, 0, most, 1, 0], device=device)
    ordered, places = stable_sort(keys, most)
    assert ordered.tolist() == [0, 0, 1, most, most]
    assert places.tolist() == [1, 4, 3, 0, 2]


def test_sums_are_rounded_once(device):
    """259 and 257 round to even, to 260 and 256. Summing in bfloat16 would give 258 and 256."""
    expansion = expand.by_expert(torch.tensor([[0, 1, 2]], device=device), 3, EXPERTS)
    parts = torch.tensor([[256.0, 256.0], [1.0, 0.5], [2.0, 0.5]], device=device)
    rows = parts.repeat(1, HIDDEN // 2).bfloat16()
    assert expand.reduce(rows, expansion).tolist() == [[260.0, 256.0] * (HIDDEN // 2)]

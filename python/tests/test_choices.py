"""Choices of single operations: variants, launch shapes, selectors; what is refused, what is passed over."""

import sys

import pytest
import torch

from nccl_ep import Choice, Query

ROWS = {"hidden": 64, "dtype": torch.bfloat16}


def test_a_choice_has_known_names():
    assert Choice("ht.ring", blocks=16, send_blocks=7) == Choice("ht.ring", 16, 7, 0)
    with pytest.raises(ValueError, match="variant: must be one of ll.reduce, .* not 'ht.rnig'"):
        Choice("ht.rnig")
    with pytest.raises(ValueError, match="blocks"):
        Choice(blocks=-1)
    with pytest.raises(TypeError, match="threads"):
        Choice(threads=1.5)


def test_results_do_not_depend_on_launches(opened):
    problem, ep, handle = opened("ll", **ROWS)
    with handle:
        own = handle.dispatch(problem.tokens)
        home = handle.combine(own.tokens, problem.weights)
        for choice in (Choice(blocks=2), Choice(send_blocks=1, threads=64), Choice(None, 2, 2, 1024, in_order=True),
                       Choice(blocks=1 << 30), Choice("ht.pull")):
            found = handle.dispatch(problem.tokens, choice=choice)
            assert torch.equal(found.counts, own.counts)
            staged = handle.combine(found.tokens, problem.weights, choice=choice, send_only=True)
            handle.complete()
            assert torch.equal(staged, home)
        with pytest.raises(TypeError, match="choice: must be a Choice, not str 'll.exact'"):
            handle.combine(own.tokens, problem.weights, choice="ll.exact")
        assert not any(ep.choices.values())


def test_a_choice_is_for_its_call_alone(opened, world, device):
    problem, ep, handle = opened("ll", **ROWS)
    asked: list[Query] = []
    ep.set_selector(lambda query: asked.append(query))
    ep.set_choice("ll_combine", Choice(blocks=2))
    with handle:
        tokens = handle.dispatch(problem.tokens, choice=Choice(blocks=1)).tokens
        handle.combine(tokens, problem.weights, choice=Choice(blocks=1))
        handle.combine(tokens, problem.weights)
        assert asked == [] and ep.choices["ll_combine"] == Choice(blocks=2)
        ep.set_choice("ll_combine", None)
        handle.combine(tokens, problem.weights)
        handle.dispatch(problem.tokens)
        ep.set_selector(None)
        handle.dispatch(problem.tokens)
    count, top_k = problem.topk_idx.shape
    assert [query.operation for query in asked] == ["ll_combine", "ll_dispatch"]
    for query in asked:
        assert (query.tokens, query.top_k, query.row_bytes) == (count, top_k, 2 * problem.hidden)
        assert query.ranks == world[1] and not query.symmetric
        assert (query.sms > 0) == (device.type == "cuda")


def test_what_a_selector_raises_is_printed(opened, monkeypatch):
    problem, ep, handle = opened("ll", **ROWS)
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: printed.append(found.exc_type))

    def fails(query):
        raise LookupError(query.operation)

    with handle:
        own = handle.dispatch(problem.tokens)
        ep.set_selector(fails)
        assert torch.equal(handle.dispatch(problem.tokens).counts, own.counts)
    assert printed == [LookupError]


def test_variants(opened):
    _, ep, _ = opened("ll", **ROWS)
    assert ep.variants("ll_dispatch") == []
    reduce, exact = ep.variants("ll_combine")
    assert (reduce.name, exact.name) == ("ll.reduce", "ll.exact")
    assert reduce.default != exact.default
    query = Query("ll_combine", 4, 2, 128, 2, 8, False)
    assert reduce.supports(query) and exact.supports(query)
    many = Query("ll_combine", 4, 3, 128, 2, 8, False)
    assert exact.supports(many) == exact.default
    assert [each.name for each in ep.variants("ht_dispatch")] == ["ht.ring", "ht.direct"]
    assert [each.supports(query) for each in ep.variants("ht_combine")] == [True, False]
    with pytest.raises(ValueError, match="operation: must be one of ll_dispatch, .* not 'combine'"):
        ep.variants("combine")
    with pytest.raises(ValueError, match="not 'dispatch'"):
        ep.set_choice("dispatch", None)


def test_views_with_a_choice(opened, device):
    problem, ep, handle = opened("ll", **ROWS)
    with handle:
        for choice in (None, Choice(blocks=1), Choice(blocks=2, threads=64)):
            received = handle.dispatch(problem.tokens, problem.weights, layout="rank", view=True,
                                       choice=choice)
            used = torch.arange(ep.max_tokens_per_rank, device=device)[:, None] < received.counts[:, None, None]
            rows = torch.where(used, received.tokens, 0)
            home = handle.combine(rows, choice=choice)
            assert torch.equal(home, problem.tokens * problem.ranks)


@pytest.mark.high_throughput
def test_choices_of_high_throughput(opened, world):
    problem, ep, handle = opened("ht", bound=9 + 2 * world[1], **ROWS)
    with handle:
        own = handle.dispatch(problem.tokens, problem.weights)
        home = handle.combine(own.tokens)
        for choice in (Choice("ht.ring", blocks=2, send_blocks=1), Choice("ht.direct"), Choice("ht.pull")):
            received = handle.dispatch(problem.tokens, problem.weights, choice=choice)
            assert torch.equal(received.tokens, own.tokens)
            assert torch.equal(received.topk_idx, own.topk_idx)
            assert torch.equal(handle.combine(received.tokens, choice=choice), home)
        tokens = problem.tokens.clone().requires_grad_()
        rows = handle.dispatch(tokens, choice=Choice(blocks=2)).tokens
        handle.combine(rows, choice=Choice(blocks=4)).sum().backward()
        assert tokens.grad is not None and not any(ep.choices.values())


def test_exact_sums(opened, size, nodes):
    """By k, where other sums are by rank."""
    problem, ep, handle = opened("ll", top_k=2, hidden=64)
    reduce, exact = ep.variants("ll_combine")
    if size < 2 or exact.default or len(set(nodes)) > 1:
        return
    tokens, weights = problem.tokens, problem.weights
    with handle:
        rows = handle.dispatch(tokens).tokens
        reduced = handle.combine(rows, weights)
        by_k = handle.combine(rows, weights, choice=Choice(exact.name))
        again = handle.combine(rows, weights, choice=Choice(reduce.name))
    assert torch.equal(reduced, again) and not torch.equal(reduced, by_k)
    first = (weights[:, :1].double() * tokens).float()
    assert torch.equal(by_k, (weights[:, 1:].double() * tokens + first).float())


def test_a_selector_knows_memory_that_peers_map(opened):
    problem, ep, handle = opened("ll", **ROWS)
    symmetric = []
    ep.heap(1 << 20)
    ep.set_selector(lambda query: symmetric.append(query.symmetric))
    with handle:
        plain = handle.dispatch(problem.tokens).tokens
        mapped = handle.dispatch(problem.tokens, out=ep.empty(plain.shape)).tokens
        handle.combine(mapped, problem.weights)
        handle.combine(plain, problem.weights)
        del mapped
        ep.library.ncclEpSetSelector(ep.handle, None)  # as C has it; `set_selector` would forget it, too
        handle.dispatch(problem.tokens)
    assert symmetric == [False, True, True, False]

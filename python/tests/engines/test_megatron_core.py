"""Megatron-Core's own files over the package named `deep_ep`: the autograd functions of its flex dispatcher, then whole
MoE layers against its all-to-all dispatcher and dense torch."""

import ast
import importlib.util
import itertools
import pathlib
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from documents import ROOT, snippets
from loading import folder, without_gpu
from nccl_ep.layers import EPAll2AllLayer
from problems import Problem

pytestmark = pytest.mark.high_throughput
_FILE = "megatron/core/transformer/moe/fused_a2a.py"
_STASH = "megatron.core.transformer.moe.ops.paged_stash"
_HIDDEN, _LOCAL = 64, 2


def _lists_of_rows(patch: pytest.MonkeyPatch) -> None:
    """Its all-to-all dispatcher brings numbers of rows to the host only from a GPU; without one, tensors stay where
    lists are due."""
    single = dist.all_to_all_single
    patch.setattr(dist, "all_to_all_single", lambda *words, **settings: single(*words, **{
        name: value.tolist() if torch.is_tensor(value) else value for name, value in settings.items()}))


@pytest.fixture(scope="module")
def core(deep_ep, world, device):
    """The package `megatron.core`. What is not about communication and missing here has stand-ins."""
    if world[1] == 1:
        pytest.skip("its flex dispatcher needs two ranks")
    place = folder(_FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        pytest.importorskip("numpy", reason="Megatron-Core needs NumPy, also from its folder")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # it compiles functions of routers, which takes minutes
        if importlib.util.find_spec("triton") is None:  # kernels for activations, imported without a look for it
            stash = types.ModuleType(_STASH)
            vars(stash).update(dict.fromkeys(("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel",
                                              "paged_stash_pop_kernel")))
            patch.setitem(sys.modules, _STASH, stash)
        if without_gpu(patch, device, current_device=device):
            _lists_of_rows(patch)
            zeros = torch.zeros  # which its hybridep dispatcher asks for a GPU, wherever other tensors are
            patch.setattr(torch, "zeros", lambda *words, **settings: zeros(*words, **settings | (
                {"device": device} if settings.get("device") == "cuda" else {})))
        import megatron.core
        from megatron.core.transformer.moe import fused_a2a, moe_utils

        assert pathlib.Path(fused_a2a.__file__).is_relative_to(place)
        assert fused_a2a.HAVE_DEEP_EP and fused_a2a.HAVE_HYBRIDEP
        # 0.16 reads this name also where Transformer Engine, which has it, is not installed.
        patch.setattr(moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None), raising=False)
        yield megatron.core


@pytest.fixture
def layers(core, world, device, monkeypatch, closed_buffers):
    """Makes two layers with the same weights: one with the flex dispatcher, one with the all-to-all dispatcher."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    new_group, backend, groups = dist.new_group, "gloo" if device.type == "cpu" else "nccl", []

    def grouped(*words, **settings):
        groups.append(new_group(*words, **settings | {"backend": settings.get("backend") or backend}))
        return groups[-1]

    monkeypatch.setattr(dist, "new_group", grouped)

    def make(tensor: int = 1, dtype: torch.dtype = torch.float32, **settings) -> list[torch.nn.Module]:
        sizes = {"tensor_model_parallel_size": tensor, "expert_tensor_parallel_size": tensor,
                 "expert_model_parallel_size": world[1] // tensor}
        parallel_state.initialize_model_parallel(**sizes)
        experts = _LOCAL * world[1]
        spec = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
        submodules = getattr(spec, "submodules", None) or spec.keywords["submodules"]
        made = [MoELayer(TransformerConfig(**{
            "num_layers": 1, "hidden_size": _HIDDEN, "num_attention_heads": 4, "num_moe_experts": experts,
            "moe_ffn_hidden_size": 32, "moe_router_topk": 3, "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": dispatcher, "moe_router_dtype": "fp32", "add_bias_linear": False,
            "params_dtype": dtype, "bf16": dtype == torch.bfloat16, "sequence_parallel": tensor > 1,
            "perform_initialization": False, **sizes, **settings}), submodules).to(device)
            for dispatcher in ("flex", "alltoall")]
        random = torch.Generator().manual_seed(7)
        for (name, weight), twin in zip(made[0].named_parameters(), made[1].parameters()):
            # Experts differ by rank.
            shape = (world[1], *weight.shape) if name.startswith("experts.") else (1, *weight.shape)
            values = torch.randn(shape, generator=random) * weight.shape[-1] ** -0.5
            weight.data.copy_(values[world[0] % len(values)])
            twin.data.copy_(weight.data)
        return made

    yield make
    fused_a2a._buffer = fused_a2a._hybrid_ep_buffer = None
    parallel_state.destroy_model_parallel()
    for each in groups:  # which torch keeps, and their threads take time
        if each in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(each)


def tokens(rank: int, rows: int, seed: int, like: torch.nn.Module) -> torch.Tensor:
    """A batch [rows, 2, H] of this rank."""
    random = torch.Generator().manual_seed(100 * rank + seed)
    weight = next(like.experts.parameters())
    return torch.randn((rows, 2, _HIDDEN), generator=random).to(weight).requires_grad_()


def loss(output: torch.Tensor) -> torch.Tensor:
    """With another gradient for each element."""
    return (output.float().square() * torch.linspace(0.5, 1.5, output.shape[-1], device=output.device)).sum()


def results(layer, hidden, forward=None):
    """Output, and the gradients of the tokens and of all weights."""
    layer.zero_grad()
    hidden.grad = None
    output = (forward or (lambda hidden: layer(hidden)[0]))(hidden)
    loss(output).backward()
    return {"output": output, "hidden": hidden.grad} | {name: each.grad for name, each in layer.named_parameters()}


def dense(layer, hidden, tensor: int):
    """The same on one rank, by the layer's router and one of its experts as a function of all ranks' weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {name: each for name, each in layer.named_parameters() if name.startswith("experts.")}
    everywhere = {}
    for name, weight in mine.items():
        parts = [torch.empty(weight.shape, dtype=weight.dtype) for _ in range(size)]
        dist.all_gather(parts, weight.detach().cpu())
        everywhere[name] = [part.to(weight.device).requires_grad_() for part in parts]

    def forward(hidden):
        probs, _ = layer.router(hidden)
        rows = hidden.flatten(0, 1)
        output = 0 if layer.shared_experts is None else layer.shared_experts(hidden).flatten(0, 1)
        for owner in range(size):
            for local, expert in enumerate(layer.experts.local_experts):
                head = f"experts.local_experts.{local}."
                weights = {name.removeprefix(head): parts[owner] for name, parts in everywhere.items()
                           if name.startswith(head)}
                factor = probs[:, owner // tensor * layer.num_local_experts + local]
                if layer.config.moe_apply_probs_on_input:
                    rows, factor = (hidden.flatten(0, 1) * factor[:, None]).to(hidden.dtype), torch.ones_like(factor)
                output = output + torch.func.functional_call(expert, weights, (rows, factor))[0]
        return output.view(hidden.shape)

    found = results(layer, hidden, forward)
    for name, parts in everywhere.items():
        for owner, part in enumerate(parts):
            dist.all_reduce(total := (torch.zeros_like(part) if part.grad is None else part.grad).cpu())
            if owner == rank:
                found[name] = total.to(part.device)
    return found


def close(got, want):
    """Equal up to roundings: by the norm, as a sum's order may differ."""
    for name, right in want.items():
        left, right = got[name].float(), right.float()
        limit = 1e-5 if want["output"].dtype == torch.float32 else 2e-2
        assert (left - right).norm() <= limit * right.norm(), name


_CASES = {
    "float32": {}, "bfloat16": {"dtype": torch.bfloat16}, "float64 weights": {"moe_router_dtype": "fp64"},
    "drops": {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "probs"},
    "shared expert": {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "top 1": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
    "losses": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
    "tensor parallel": {"tensor": 2},
}


def micro_batches(world, device, run):
    """Three in flight, of two types, with ids of -1 and without tokens on rank 1; the first goes back first. Each has
    the right output, and gradients of its tokens and weights."""
    running = []
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        problem = Problem(*world, hidden=_HIDDEN, masked=True, dtype=dtype, device=device, seed=seed)
        output = run(problem, problem.tokens.requires_grad_(), problem.weights.requires_grad_())
        running.append((problem, output))
    for problem, output in running:
        problem.backward(output)
        problem.check(output)


@pytest.mark.parametrize("is_async", [False, True])
def test_functions(core, world, device, is_async):
    """One Buffer serves all micro-batches."""
    from megatron.core.transformer.moe import fused_a2a

    buffers = set()

    def run(problem, hidden, weights):
        group, local = dist.group.WORLD, problem.num_experts // world[1]
        rows, ids, factors, counts, handle = fused_a2a.fused_dispatch(
            hidden, problem.topk_idx, weights, problem.num_experts, group, is_async, is_async)
        assert counts.tolist() == [int((ids == expert).sum()) for expert in range(local)]
        found = problem.mixed(rows, ids, factors, problem.local_experts(local))
        buffers.add(fused_a2a._buffer)
        return fused_a2a.fused_combine(found.to(problem.dtype), group, handle, is_async, is_async)[0]

    micro_batches(world, device, run)
    assert len(buffers) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_hybrid_functions(core, world, device, waits):
    """By maps and a matrix of factors; with a bound of rows or without."""
    from megatron.core.transformer.moe import fused_a2a

    def run(problem, hidden, weights):
        experts, local = problem.num_experts, problem.num_experts // world[1]
        ids = problem.topk_idx.remainder(experts + 1)  # -1 is the last
        probs = weights.new_zeros((len(ids), experts + 1)).scatter(1, ids, weights)[:, :experts]
        routing_map = torch.zeros((len(ids), experts + 1), dtype=torch.bool, device=device).scatter(1, ids, True)
        rows, factors, _, counts, handle = fused_a2a.hybrid_ep_dispatch(
            hidden, routing_map[:, :experts], probs, dist.group.WORLD, local, pad_multiple=8,
            num_permuted_tokens=None if waits else 1000)
        assert len(rows) == (counts.sum() if waits else 1000) and not counts.remainder(8).any()
        parts = [*counts.tolist(), len(rows) - int(counts.sum())]
        found = [factor[:, None] * problem.expert(matrix, block) for matrix, block, factor in zip(
            problem.local_experts(local), rows.split(parts), factors.split(parts))]
        found.append(rows.new_zeros((parts[-1], _HIDDEN)))
        return fused_a2a.hybrid_ep_combine(torch.cat(found).to(problem.dtype), handle, len(rows), 8)

    micro_batches(world, device, run)
    fused_a2a.reset_hybrid_ep_buffer()


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
@pytest.mark.parametrize("case", _CASES)
def test_layer(core, layers, world, device, case, backend):
    """Several steps with numbers of tokens that differ by rank and step, and one computed anew in the backward."""
    if case == "shared expert" and core.__version__.startswith("0.16."):
        pytest.skip("0.16 has no shared experts beside its flex dispatcher")
    flex, alltoall = layers(**_CASES[case], moe_flex_dispatcher_backend=backend)
    tensor = _CASES[case].get("tensor", 1)
    for step in range(3):
        hidden = tokens(world[0], 1 if (world[0], step) == (1, 1) else 6 + 3 * world[0] - step, step, flex)
        got = results(flex, hidden)
        close(got, dense(flex, hidden, tensor))
        if tensor == 1 or device.type != "cpu":  # gloo gathers only equal numbers of rows
            close(got, results(alltoall, hidden))
    close(results(flex, hidden, lambda hidden: checkpoint(flex, hidden, use_reentrant=True)[0]), got)
    with torch.inference_mode():
        flex.eval()
        close({"output": flex(hidden)[0]}, {"output": got["output"].detach()})


@pytest.mark.parametrize("settings", [
    {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0},
    {"moe_hybridep_pad_uneven_dispatch_inputs": True}], ids=["experts", "tokens"])
def test_padding(core, layers, world, settings):
    """Experts up to their capacity, so that tokens may have more of them than top-k; tokens up to those of others."""
    is_uneven = "moe_hybridep_pad_uneven_dispatch_inputs" in settings
    if is_uneven and core.__version__.startswith("0.16."):
        pytest.skip("0.16 pads no tokens")
    flex, _ = layers(moe_flex_dispatcher_backend="hybridep", **settings)
    hidden = tokens(world[0], 6 + 3 * world[0] * is_uneven, 1, flex)
    close(results(flex, hidden), dense(flex, hidden, 1))


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_uneven_routing(layers, world, backend):
    """Another number of experts for each token, none for some, all on rank 0; rank 1 has no tokens, which its router
    could not take."""
    flex, _ = layers(moe_expert_capacity_factor=10.0, moe_flex_dispatcher_backend=backend)

    def router(hidden, *_):
        rows = hidden.flatten(0, 1)
        chosen = torch.rand((len(rows), flex.config.num_moe_experts), generator=torch.Generator().manual_seed(3)) < 0.5
        chosen[:, _LOCAL:] = False
        chosen = chosen.to(rows.device)
        return torch.where(chosen, rows[:, :chosen.shape[1]].sigmoid(), 0.0), chosen

    flex.router.forward = router
    hidden = tokens(world[0], 0 if world[0] == 1 else 5, 1, flex)
    got, want = results(flex, hidden), dense(flex, hidden, 1)
    close({name: each for name, each in got.items() if each is not None},
          {name: each for name, each in want.items() if name != "router.weight"})


@pytest.fixture
def documented(world):
    """Puts the manager of docs/guide/engines.md, over a layer of its own, into the dispatchers of layers."""
    guide = ROOT / "docs" / "guide" / "engines.md"
    if not guide.exists():
        pytest.skip("there are no documents")
    [code] = [code for code in snippets(guide) if "class NcclEpManager" in code]
    tree = ast.parse(code)
    tree.body = [each for each in tree.body if isinstance(each, (ast.Import, ast.ImportFrom, ast.ClassDef))]
    names: dict = {}
    exec(compile(tree, "engines.md", "exec"), names)
    made = []

    def put(moe, tensor: int = 1):
        top_k, experts = tensor * moe.config.moe_router_topk, tensor * moe.config.num_moe_experts
        made.append(EPAll2AllLayer(moe.token_dispatcher.tp_ep_group, 16, _HIDDEN, top_k, world[0], experts, world[1],
                                   world[1], dtype=moe.config.params_dtype))
        moe.token_dispatcher._comm_manager = names["NcclEpManager"](made[-1], top_k)
        return moe

    yield put
    for each in made:
        each.finalize()


@pytest.mark.parametrize("case", ["bfloat16", "drops", "float64 weights", "tensor parallel"])
def test_documented_manager(layers, documented, world, case):
    """A manager for this library in the flex dispatcher."""
    tensor = _CASES[case].get("tensor", 1)
    flex = documented(layers(**_CASES[case])[0], tensor)
    for step in range(2):
        hidden = tokens(world[0], 6 + 3 * world[0] - step, step, flex)
        close(results(flex, hidden), dense(flex, hidden, tensor))


def _in_a_model(moe):
    """A transformer layer around this one; another function stands for its attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    spec = get_gpt_layer_local_spec(num_experts=moe.config.num_moe_experts, moe_grouped_gemm=False)
    layer = TransformerLayer(moe.config, spec.submodules).to(next(moe.parameters()).device)
    layer.mlp = moe
    layer._forward_attention = lambda hidden_states, **_: (hidden_states * 1.5, None)
    return layer


def _nodes(layer, streams):
    """What its schedule runs of a layer for one micro-batch."""
    from megatron.core.models.gpt import fine_grained_callables

    try:
        from megatron.core.models.common.utils import TransformerLayerNode
    except ImportError:  # 0.16
        TransformerLayerNode = fine_grained_callables.TransformerLayerNode
    state, event = types.SimpleNamespace(), torch.cuda.Event()
    decoder = types.SimpleNamespace(final_layernorm=None)
    chunk = types.SimpleNamespace(model=types.SimpleNamespace(decoder=decoder), **dict.fromkeys((
        "attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params",
        "sequence_len_offset")))
    functions, _ = fine_grained_callables.build_transformer_layer_callables(layer)
    return [TransformerLayerNode(stream, event, state, chunk, function, name, extra_args={
        "config": layer.config, "is_moe": True, "num_local_experts": _LOCAL})
        for stream, function, name in zip(streams * 2, functions, ("attn", "moe_dispatch", "mlp", "moe_combine"))]


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_overlap(layers, world, backend):
    """By its schedule on two streams, one micro-batch's backward between the parts of the other's forward. It empties
    tensors that dispatch and the experts have given."""
    layer, other = [_in_a_model(each) for each in layers(hidden_dropout=0.0, moe_flex_dispatcher_backend=backend)]
    compute, communicate = streams = torch.cuda.current_stream(), torch.cuda.Stream()
    batches = [tokens(world[0], 5 + world[0] + seed, seed, layer.mlp) for seed in range(2)]
    want = [results(other, hidden, lambda hidden: other(hidden, attention_mask=None)[0]) for hidden in batches]
    first, second = _nodes(layer, streams), _nodes(layer, streams)

    def run(value, coming=(), grad=None, going=()):
        """One's forward from its input, another's backward from its gradient, a node of each in turns."""
        communicate.wait_stream(compute)
        for forward, backward in itertools.zip_longest(coming, going[::-1]):
            value = forward.forward(value) if forward else value
            grad = backward.backward(grad) if backward else grad
        compute.wait_stream(communicate)
        return value, grad

    def turn(output):
        """The gradient of an output."""
        leaf = output.detach().clone().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)[0]

    one, _ = run(batches[0], first)
    two, one_grad = run(batches[1], second, turn(one), first)
    _, two_grad = run(None, (), turn(two), second)
    for output, grad, right in ((one, one_grad, want[0]), (two, two_grad, want[1])):
        close({"output": output, "hidden": grad}, {"output": right["output"], "hidden": right["hidden"]})
    grads = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
    assert len(grads) > len(list(layer.mlp.parameters()))
    close(grads | {"output": two}, {name: want[0][name] + want[1][name] for name in grads} | {"output": two})

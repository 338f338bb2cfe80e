"""`EpHandle`: one routing of tokens to experts, and its operations, for torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from nccl_ep.choices import Choice, chosen
from nccl_ep.errors import InvalidUsageError
from nccl_ep.gradients import check_differentiable, has_rest, needs_gradient
from nccl_ep.modes import Mode
from nccl_ep.operators.traced import is_traced, runs_now, traced
from nccl_ep.results import (DispatchResult, LowLatencyResult, LowLatencyScaledResult,
                             RankMajorResult, ScaledResult, WeightedResult, WeightedScaledResult,
                             result_class)
from nccl_ep.routed import Routed
from nccl_ep.row_layout import (RowLayout, check_weights_of_combine, checked_layout,
                                low_latency_shape)
from nccl_ep.scales import (CastName, ScaledRows, ScalesOrder, check_order, check_scale_output,
                            checked_scales, new_scales, scaled_rows)
from nccl_ep.tensors import Tag, TensorList, checked, checked_output, written
from nccl_ep.types import ncclEpDispatchConfig_t
from nccl_ep.views import WITHOUT_MEMORY, check_view, without_views

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nccl_ep.group import EpGroup
    from nccl_ep.options import AnyOptions, Options, RankOptions, ScaledOptions

_NO_OPTIONS = ncclEpDispatchConfig_t()
_ROUND_SCALES = ncclEpDispatchConfig_t(round_scales=1)


class _Request(NamedTuple):
    """What a dispatch is to deliver, and where to."""

    by_rank: bool
    view: bool
    scaled: ScaledRows | None
    order: ScalesOrder
    out: torch.Tensor | None
    out_scales: torch.Tensor | None


class EpHandle(Routed[Mode]):
    """One routing. Made by `EpGroup.create_handle`; destroyed by `close`, or with the object.

    Operations are enqueued on `stream` (a torch stream; None: the current one), and every rank
    calls them in the same order. A stream other than the current one first waits for the current
    one; users of the results on other streams must wait for `stream`. On the CPU every operation
    has finished when its call returns.
    LL reads `topk_idx` again in each operation, so it may be changed in place: the caller's tensor
    if it is int64 and contiguous, else the copy `handle.topk_idx`. HT reads it once: its
    `handle.topk_idx` is a copy, which is not to be changed, or of `open_handle` what the update got.
    A handle that a CUDA graph has captured lives until `close` or the end of the group.

    One of `EpGroup.open_handle` gets its routings by `update`. With `expert_alignment` in HT a dispatch delivers rows
    [P, H] by expert, then source rank and token, one for each expert that a token names, and weights [P], no ids.
    Those of an expert begin at a multiple of the alignment, with zeros behind the last. Behind all of them weights are
    0, and rows, too, in new tensors while gradients are enabled; else undefined. A combine sums a token's rows.
    """

    @overload
    def dispatch(self, tokens: torch.Tensor, topk_weights: torch.Tensor, *,
                 layout: Literal["rank"], **options: Unpack[RankOptions]) -> RankMajorResult: ...

    @overload
    def dispatch(self: EpHandle[Literal["ll"]], tokens: torch.Tensor, topk_weights: None = None, *,
                 scales: torch.Tensor, cast: None = None,
                 **options: Unpack[ScaledOptions]) -> LowLatencyScaledResult: ...

    @overload
    def dispatch(self: EpHandle[Literal["ll"]], tokens: torch.Tensor, topk_weights: None = None, *,
                 scales: None = None, cast: CastName,
                 **options: Unpack[ScaledOptions]) -> LowLatencyScaledResult: ...

    @overload
    def dispatch(self: EpHandle[Literal["ll"]], tokens: torch.Tensor, topk_weights: None = None, *,
                 scales: None = None, cast: None = None,
                 **options: Unpack[Options]) -> LowLatencyResult: ...

    @overload
    def dispatch(self, tokens: torch.Tensor, topk_weights: torch.Tensor, *,
                 scales: torch.Tensor, cast: None = None,
                 **options: Unpack[ScaledOptions]) -> WeightedScaledResult: ...

    @overload
    def dispatch(self, tokens: torch.Tensor, topk_weights: torch.Tensor, *,
                 scales: None = None, cast: CastName,
                 **options: Unpack[ScaledOptions]) -> WeightedScaledResult: ...

    @overload
    def dispatch(self, tokens: torch.Tensor, topk_weights: torch.Tensor,
                 **options: Unpack[AnyOptions]) -> WeightedResult: ...

    @overload
    def dispatch(self, tokens: torch.Tensor, topk_weights: None = None, *,
                 scales: torch.Tensor, cast: None = None,
                 **options: Unpack[ScaledOptions]) -> ScaledResult: ...

    @overload
    def dispatch(self, tokens: torch.Tensor, topk_weights: None = None, *,
                 scales: None = None, cast: CastName,
                 **options: Unpack[ScaledOptions]) -> ScaledResult: ...

    @overload
    def dispatch(self, tokens: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
                 layout: RowLayout = "expert", **options: Unpack[RankOptions]) -> DispatchResult: ...

    def dispatch(self, tokens: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
                 layout: RowLayout = "expert", scales: torch.Tensor | None = None,
                 cast: CastName | None = None, scales_order: ScalesOrder = "row",
                 out: torch.Tensor | None = None, out_scales: torch.Tensor | None = None,
                 send_only: bool = False, stream: Any = None, view: bool = False,
                 choice: Choice | None = None) -> DispatchResult:
        """Sends `tokens` [T, H] to their experts. HT: `topk_weights` float32 [T, K] go with them;
        so they do in LL with `layout` "rank": a row for each token and rank. With `view` its tokens
        are in memory of the group (docs/python.md says how long); rows of it that hold nothing must
        not be written.

        `scales` [T, S] of any type of 1, 2 or 4 bytes go with rows of any type; or `cast` rounds
        bfloat16, float16 or float32 rows to float8_e4m3fn and makes scales: "fp8" (float32 for 128
        elements), "fp8_pow2" (powers of two), "ue8m0" (uint8 exponents), "ue8m0_packed" (int32 of
        four), "mxfp8" (uint8 for 32). `scales_order` "column" makes columns a multiple of 16 bytes
        apart, as block-scaled matrix products want; `out_scales` may have any such order.
        The result has ids and weights if there are `topk_weights`, and scales with either of the
        others; its class says so.
        `out` gets the tokens; by default a new tensor, whose rows without a token are undefined in
        LL and zero in HT. LL with `send_only`: the result is there after `complete`. HT without
        `out` and `stream` is differentiable; backward is collective, too. `choice` is for this call
        alone and not for its backward: see `EpGroup.set_choice`.
        """
        if choice is not None:
            with chosen(self.group, "dispatch", choice, tokens):
                return self.dispatch(tokens, topk_weights, layout=layout, scales=scales, cast=cast,
                                     scales_order=scales_order, out=out, out_scales=out_scales,
                                     send_only=send_only, stream=stream, view=view)
        by_rank = checked_layout(layout, self.group.algorithm, topk_weights is not None)
        check_view(view, by_rank, out is not None)
        if is_traced(stream) and not (view and runs_now(tokens)):
            if view:
                from nccl_ep.operators.graph_break import dispatch_view

                return dispatch_view(self, tokens, topk_weights, layout=layout, scales=scales, cast=cast,
                                     scales_order=scales_order, out_scales=out_scales, send_only=send_only)
            return traced(self).dispatch(tokens, topk_weights, scales=scales, cast=cast,
                                         scales_order=scales_order, out=out, out_scales=out_scales,
                                         send_only=send_only, stream=stream)
        self._check_routed()
        tokens = checked("tokens", tokens, (self.num_tokens, "H"), self.group.device)
        if topk_weights is not None:
            topk_weights = self._weights(topk_weights, self.num_tokens)
        if scales is not None:
            scales = checked_scales(scales, self.num_tokens, self.group.device)
        is_scaled = scales is not None or cast is not None
        if needs_gradient(tokens, topk_weights, scales):
            plain = out is None and not send_only and stream is None and not is_scaled
            check_differentiable(self.group.algorithm, "dispatch", plain)
            from nccl_ep import autograd

            return autograd.dispatch(self, tokens, topk_weights)
        request = _Request(by_rank, view, scaled_rows(tokens, scales, cast) if is_scaled else None, scales_order, out,
                           out_scales)
        self._check(request, tokens)
        return self._deliver(request, tokens, topk_weights, scales, send_only, stream)

    def _check(self, request: _Request, tokens: torch.Tensor) -> None:
        """Refuses what can be refused before other ranks are waited for."""
        group, rows, out_scales = self.group, request.scaled, request.out_scales
        check_order(request.order)
        if request.out is not None:
            shape = (low_latency_shape(group, 0, request.by_rank)[0],) if group.algorithm == "ll" else ()
            checked_output("out", request.out, (*shape, "rows", tokens.shape[1]), group.device,
                           tokens.dtype if rows is None else rows.dtype)
        if out_scales is not None:
            if rows is None:
                raise ValueError("out_scales: needs scales or cast")
            check_scale_output(out_scales, rows.scale_dtype, group.device)

    def _deliver(self, request: _Request, tokens: torch.Tensor, weights: torch.Tensor | None,
                 scales: torch.Tensor | None, send_only: bool, stream: Any) -> DispatchResult:
        """A dispatch whose arguments are right."""
        group, rows = self.group, request.scaled
        ids = None if weights is None or group.algorithm == "ll" or self.keeps_ids else self.topk_idx
        inputs = TensorList((Tag.TOKENS, tokens), (Tag.SCALES, scales), (Tag.TOPK_IDX, ids),
                            (Tag.TOPK_WEIGHTS, weights))
        result = self._result(request, tokens, weights is not None, stream)
        outputs = TensorList((Tag.TOKENS, result.tokens), (Tag.SCALES, result.scales),
                             (Tag.TOPK_IDX, result.topk_idx), (Tag.TOPK_WEIGHTS, result.topk_weights))
        counter = TensorList((Tag.RECV_EXPERT_COUNTER_DEVICE, result.counts))
        given = [each for each in (request.out, request.out_scales) if each is not None]
        self._run("dispatch", (inputs, without_views(outputs), counter), given, send_only, stream,
                  _ROUND_SCALES if rows is not None and rows.round_scales else _NO_OPTIONS)
        self._by_rank = request.by_rank
        return group.views.shown(result, outputs, group.device) if request.view else result

    def _result(self, request: _Request, tokens: torch.Tensor, weighted: bool, stream: Any) -> DispatchResult:
        """Memory for what a dispatch delivers. In HT the host may wait here for the number of rows, unless there is an
        `out`, and the GPU then waits for the host: do as little as possible afterwards."""
        group, rows, out = self.group, request.scaled, request.out
        low_latency = group.algorithm == "ll"
        # Gradients of the experts' parameters read all rows.
        behind = has_rest(self) and torch.is_grad_enabled()
        if out is None:
            shape = (low_latency_shape(group, tokens.shape[1], request.by_rank) if low_latency else
                     (self._ask_rows(stream), tokens.shape[1]))
            out = (torch.zeros if behind else torch.empty)(
                shape, dtype=tokens.dtype if rows is None else rows.dtype,
                device=WITHOUT_MEMORY if request.view else group.device)
        has_ids = weighted and not self.expert_alignment
        result = result_class(low_latency, has_ids, rows is not None)(out)
        if rows is not None:
            made = request.out_scales
            if made is None:
                made = new_scales((*out.shape[:-1], rows.scales), rows.scale_dtype, request.order, group.device, behind)
            result = result._replace(scales=made)
        if low_latency:
            zones = group.world_size if request.by_rank else group.num_local_experts
            result = result._replace(counts=self._new((zones,), torch.int32))
        if has_ids:
            routing = (*out.shape[:-1], self.top_k)
            result = result._replace(topk_idx=self._new(routing, torch.int64),
                                     topk_weights=self._new(routing, torch.float32))
        elif weighted:
            result = result._replace(topk_weights=self._new((out.shape[0],), torch.float32))
        return result

    def combine(self, tokens: torch.Tensor, topk_weights: torch.Tensor | None = None, *,
                out: torch.Tensor | None = None, send_only: bool = False, stream: Any = None,
                choice: Choice | None = None) -> torch.Tensor:
        """Returns results to their home ranks: [T, H], for each token the sum over its experts.
        LL: `tokens` [L, R*M, H], `topk_weights` float32 [T, K], the factors of the sum; after a
        dispatch with layout "rank" `tokens` [R, M, H] alone, weighed and summed as in HT.
        HT: `tokens` [n, H], weights already applied and a token's experts on this rank summed;
        differentiable as `dispatch` is. `choice` as there.
        """
        if choice is not None:
            with chosen(self.group, "combine", choice, tokens):
                return self.combine(tokens, topk_weights, out=out, send_only=send_only,
                                    stream=stream)
        if is_traced(stream) and not (self._by_rank and runs_now(tokens)):
            return traced(self).combine(tokens, topk_weights, out=out, send_only=send_only,
                                        stream=stream)
        group = self.group
        check_weights_of_combine(group.algorithm, self._by_rank, topk_weights is not None)
        tokens = self._results(tokens)
        local = None if topk_weights is None else self._weights(topk_weights, self.num_tokens)
        if needs_gradient(tokens, local):
            plain = out is None and not send_only and stream is None
            check_differentiable(group.algorithm, "combine", plain)
            from nccl_ep import autograd

            return autograd.ht_combine(self, tokens)
        given = [] if out is None else [out]
        out = self._home(tokens, out)
        self._run("combine",
                  (TensorList((Tag.TOKENS, tokens)), TensorList((Tag.TOKENS, out)),
                   TensorList((Tag.TOPK_WEIGHTS, local))), given, send_only, stream)
        return out

    def combine_with_weights(self, tokens: torch.Tensor, topk_weights: torch.Tensor, *,
                             stream: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """HT, the backward of a dispatch with weights: `tokens` [n, H], `topk_weights` [n, K].

        Returns the sums [T, H] and the weights [T, K], by ascending global expert id, then zeros; of a handle of
        `open_handle` by k. Where rows lie by expert `topk_weights` are [P].
        """
        if is_traced(stream):
            return traced(self).combine_with_weights(tokens, topk_weights, stream=stream)
        tokens = self._results(tokens)
        weights = (checked("topk_weights", topk_weights, tokens.shape[:1], self.group.device, torch.float32)
                   if self.expert_alignment else self._weights(topk_weights, tokens.shape[0]))
        if needs_gradient(tokens, weights):
            check_differentiable(self.group.algorithm, "combine_with_weights", False)
        out = self._home(tokens, None)
        home_weights = self._new((self.num_tokens, self.top_k), torch.float32)
        self._run("combine",
                  (TensorList((Tag.TOKENS, tokens), (Tag.TOPK_WEIGHTS, weights)),
                   TensorList((Tag.TOKENS, out), (Tag.TOPK_WEIGHTS, home_weights)),
                   TensorList()), [], False, stream)
        return out, home_weights

    def complete(self, *, stream: Any = None) -> None:
        """LL: receives what the staged operation has sent. Does nothing if none is staged.

        `stream` waits for the send phase only, so work on the current stream continues meanwhile.
        """
        if is_traced(stream):
            return traced(self).complete(stream=stream)
        group = self.group
        address = group.runtime.stream(stream)
        with group.runtime.current():
            group.call(group.library.ncclEpComplete, self.handle, None, address)
            self._keep_if_captured(stream)
        staged, self._staged = self._staged, []
        outputs, self.staged_outputs = self.staged_outputs, []
        written(outputs)
        if staged and address != self._staged_on:
            group.runtime.keep_for(stream, staged)
        group.settle(self.topk_idx, staged)

    def _run(self, operation: Literal["dispatch", "combine"],
             lists: tuple[TensorList, TensorList, TensorList], given: list[torch.Tensor],
             send_only: bool, stream: Any, config: ncclEpDispatchConfig_t | None = None) -> None:
        """Enqueues an operation; `given` are those outputs that the caller chose."""
        group = self.group
        dispatches = operation == "dispatch"
        function = group.library.ncclEpDispatch if dispatches else group.library.ncclEpCombine
        arguments = [each for tensors in lists for each in (tensors.array, tensors.count)]
        group.runtime.follow(stream)
        group.note(operation)
        with group.runtime.current():
            address = group.runtime.stream(stream)
            if address not in self._ids_kept_for:
                self._ids_kept_for.add(address)
                group.runtime.wait_for_event(stream, self._ids_copied)
                group.runtime.keep_for(stream, [self.topk_idx])
            group.call(function, self.handle, *arguments, send_only, config, address)
            self._keep_if_captured(stream)
        written(given)
        # LL reads the ids in every phase, even after the caller has dropped the handle.
        used = [self.topk_idx, *lists[0].tensors, *lists[1].tensors, *lists[2].tensors]
        group.runtime.hand_over(stream, used)
        if group.totals:
            used += group.totals.values()
            group.runtime.keep_for(stream, group.totals.values())
        if send_only and group.algorithm == "ll":
            # The receive phase writes to them, even if the caller drops them.
            self._staged += used
            self.staged_outputs = [*lists[1].tensors, *(lists[2].tensors if dispatches else ())]
            self._staged_on = address
        group.settle(used)

    def _check_routed(self) -> None:
        """Before shapes, which a routing tells."""
        if not self.routing:
            raise InvalidUsageError(5, "invalid usage", "handle: has no routing yet; its update comes first")

    def _results(self, tokens: torch.Tensor) -> torch.Tensor:
        self._check_routed()
        shape: tuple[int | str, ...] = ("n", "H")
        if self.group.algorithm == "ll":
            shape = (*low_latency_shape(self.group, 0, self._by_rank)[:-1], "H")
        return checked("tokens", tokens, shape, self.group.device)

    def _home(self, tokens: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        shape = (self.num_tokens, tokens.shape[-1])
        if out is None:
            return self._new(shape, tokens.dtype)
        return checked_output("out", out, shape, self.group.device, tokens.dtype)

    def _weights(self, weights: torch.Tensor, rows: int) -> torch.Tensor:
        return checked("topk_weights", weights, (rows, self.top_k), self.group.device,
                       torch.float32)

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.group.device)

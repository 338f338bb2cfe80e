"""`EpHandle`: one routing of tokens to experts, and its operations, for torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, overload

import torch

from nccl_ep.arguments import cannot_be_copied
from nccl_ep.choices import Choice, chosen
from nccl_ep.gradients import check_differentiable, needs_gradient
from nccl_ep.modes import Mode
from nccl_ep.operators.numbers import forget, register
from nccl_ep.operators.traced import is_traced, runs_now, traced
from nccl_ep.results import (DispatchResult, LowLatencyResult, LowLatencyScaledResult,
                             RankMajorResult, ScaledResult, WeightedResult, WeightedScaledResult,
                             result_class)
from nccl_ep.row_layout import (RowLayout, check_weights_of_combine, checked_layout,
                                low_latency_shape)
from nccl_ep.scales import (CastName, ScalesOrder, checked_scale_output, checked_scales,
                            new_scales, scaled_rows)
from nccl_ep.tensors import (Tag, TensorList, checked, checked_integers, checked_output,
                             describe, written)
from nccl_ep.types import ncclEpDispatchConfig_t
from nccl_ep.views import WITHOUT_MEMORY, check_view, without_views

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nccl_ep.group import EpGroup
    from nccl_ep.options import AnyOptions, Options, RankOptions, ScaledOptions

_NO_OPTIONS = ncclEpDispatchConfig_t()
_ROUND_SCALES = ncclEpDispatchConfig_t(round_scales=1)


class EpHandle(Generic[Mode]):
    """One routing. Made by `EpGroup.create_handle`; destroyed by `close`, or with the object.

    Operations are enqueued on `stream` (a torch stream; None: the current one), and every rank
    calls them in the same order. A stream other than the current one first waits for the current
    one; users of the results on other streams must wait for `stream`. On the CPU every operation
    has finished when its call returns.
    LL reads `topk_idx` again in each operation, so it may be changed in place: the caller's tensor
    if it is int64 and contiguous, else the copy `handle.topk_idx`. HT reads it once: its
    `handle.topk_idx` is always a copy, which is not to be changed.
    A handle that a CUDA graph has captured lives until `close` or the end of the group.
    """

    def __init__(self, group: EpGroup[Mode], topk_idx: torch.Tensor, *,
                 counts: torch.Tensor | None = None, stream: Any = None) -> None:
        self._handle: Any = None
        self._staged: list[TensorList] = []
        self._staged_on: int | None = None
        self.staged_outputs: list[torch.Tensor] = []
        self._rows: int | None = None
        self._by_rank = False
        self.number = register(self)  # of operators
        self.group = group
        self.topk_idx = checked_integers("topk_idx", topk_idx, ("T", "K"), group.device)
        # The streams for which the allocator keeps the ids. It keeps a copy, which nobody else
        # knows of, for the stream that it was made on.
        self._ids_kept_for = {group.runtime.stream(None), group.runtime.stream(stream)}
        self.num_tokens, self.top_k = self.topk_idx.shape
        if counts is not None:
            counts = checked_output("counts", counts, (group.num_local_experts,), group.device,
                                    torch.int32)
        counter = TensorList((Tag.RECV_EXPERT_COUNTER_DEVICE, counts))
        group.runtime.follow(stream)
        with group.runtime.current():
            self._handle = group.call(
                group.library.ncclEpCreateHandle, group.handle,
                describe(self.topk_idx, Tag.TOPK_IDX), None, group.runtime.stream(stream),
                counter.descriptors)
        group.runtime.hand_over(stream, [self.topk_idx, *counter.tensors])
        written(counter.tensors)
        if group.algorithm == "ht" and self.topk_idx.data_ptr() == topk_idx.data_ptr():
            # A dispatch with weights finds them by the ids. Behind the exchange, which others wait
            # for.
            with group.runtime.on(stream):
                self.topk_idx = self.topk_idx.clone()
            self._ids_kept_for = {group.runtime.stream(stream)}

    @property
    def handle(self) -> Any:
        """The ncclEpHandle_t, for calls to the library."""
        if self._handle is None:
            raise RuntimeError("the handle is closed")
        return self._handle

    @property
    def num_recv_tokens(self) -> int:
        """HT: rows that a dispatch can deliver here; the exact count if the group has no bound M.
        """
        if self._rows is None:
            ask = self.group.library.ncclEpHandleGetNumRecvTokens
            self._rows = int(self.group.call(ask, self.handle))
        return self._rows

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
        are in memory of the group (docs/python.md says how long).

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
            with chosen(self, "dispatch", choice, tokens):
                return self.dispatch(tokens, topk_weights, layout=layout, scales=scales, cast=cast,
                                     scales_order=scales_order, out=out, out_scales=out_scales,
                                     send_only=send_only, stream=stream, view=view)
        by_rank = checked_layout(layout, self.group.algorithm, topk_weights is not None)
        check_view(view, by_rank, out is not None)
        if is_traced(stream):
            return traced(self).dispatch(tokens, topk_weights, scales=scales, cast=cast,
                                         scales_order=scales_order, out=out, out_scales=out_scales,
                                         send_only=send_only, stream=stream)
        group = self.group
        low_latency = group.algorithm == "ll"
        tokens = checked("tokens", tokens, (self.num_tokens, "H"), group.device)
        ids = None
        if topk_weights is not None:
            ids = None if low_latency else self.topk_idx
            topk_weights = self._weights(topk_weights, self.num_tokens)
        is_scaled = scales is not None or cast is not None
        if needs_gradient(tokens, topk_weights, scales):
            plain = out is None and not send_only and stream is None and not is_scaled
            check_differentiable(group.algorithm, "dispatch", plain)
            from nccl_ep import autograd

            return autograd.dispatch(self, tokens, topk_weights)
        if scales is not None:
            scales = checked_scales(scales, self.num_tokens, group.device)
        inputs = TensorList((Tag.TOKENS, tokens), (Tag.SCALES, scales), (Tag.TOPK_IDX, ids),
                            (Tag.TOPK_WEIGHTS, topk_weights))
        # In HT the host may wait here, and the GPU then waits for the host: do as little as
        # possible afterwards.
        shape = self._received_shape(tokens.shape[1], by_rank)
        rows = scaled_rows(tokens, scales, cast) if is_scaled else None
        dtype = tokens.dtype if rows is None else rows.dtype
        given = [each for each in (out, out_scales) if each is not None]
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=WITHOUT_MEMORY if view else group.device)
        else:
            checked_output("out", out, (*shape[:-2], "rows", shape[-1]), group.device, dtype)
        if rows is None:
            if out_scales is not None:
                raise ValueError("out_scales: needs scales or cast")
        elif out_scales is not None:
            checked_scale_output(out_scales, group.device)
        else:
            out_scales = new_scales((*out.shape[:-1], rows.scales), rows.scale_dtype, scales_order,
                                    group.device)
        result = result_class(low_latency, topk_weights is not None, is_scaled)(out)
        if low_latency:
            zones = group.world_size if by_rank else group.num_local_experts
            result = result._replace(counts=self._new((zones,), torch.int32))
        if topk_weights is not None:
            routing = (*out.shape[:-1], self.top_k)
            result = result._replace(topk_idx=self._new(routing, torch.int64),
                                     topk_weights=self._new(routing, torch.float32))
        if rows is not None:
            result = result._replace(scales=out_scales)
        outputs = TensorList((Tag.TOKENS, out), (Tag.SCALES, result.scales),
                             (Tag.TOPK_IDX, result.topk_idx),
                             (Tag.TOPK_WEIGHTS, result.topk_weights))
        counter = TensorList((Tag.RECV_EXPERT_COUNTER_DEVICE, result.counts))
        rounds = rows is not None and rows.round_scales
        self._run("dispatch", (inputs, without_views(outputs), counter), given, send_only, stream,
                  _ROUND_SCALES if rounds else _NO_OPTIONS)
        self._by_rank = by_rank
        return group.views.shown(result, outputs, group.device) if view else result

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
            with chosen(self, "combine", choice, tokens):
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

        Returns the sums [T, H] and the weights [T, K], by ascending global expert id, then zeros.
        """
        if is_traced(stream):
            return traced(self).combine_with_weights(tokens, topk_weights, stream=stream)
        tokens = self._results(tokens)
        weights = self._weights(topk_weights, tokens.shape[0])
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
            group.runtime.keep_for(stream, self._memory(staged))
        group.settle()

    def close(self) -> None:
        """Destroys the handle; local. A second call does nothing."""
        handle, self._handle = self._handle, None
        self._staged, self.staged_outputs = [], []
        forget(self.number)
        if handle is not None:
            self.group.library.ncclEpHandleDestroy(handle)

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
            group.call(function, self.handle, *arguments, send_only, config, address)
            self._keep_if_captured(stream)
        written(given)
        if address not in self._ids_kept_for:
            self._ids_kept_for.add(address)
            group.runtime.keep_for(stream, [self.topk_idx])
        if stream is not None:
            group.runtime.hand_over(stream, self._memory(lists))
        if send_only and group.algorithm == "ll":
            # The receive phase writes to them, even if the caller drops them.
            self._staged.extend(lists)
            self.staged_outputs = [*lists[1].tensors, *(lists[2].tensors if dispatches else ())]
            self._staged_on = address
        group.settle()

    def _memory(self, lists: Iterable[TensorList]) -> list[torch.Tensor]:
        """The tensors that operations with these lists use."""
        # LL reads the ids in every phase, even after the caller has dropped the handle.
        return [self.topk_idx, *(tensor for each in lists for tensor in each.tensors)]

    def _keep_if_captured(self, stream: Any) -> None:
        """If `stream` is captured, keeps the handle: replays of the graph use it."""
        if self.group.runtime.is_capturing(stream):
            self.group.keep(self)

    def _received_shape(self, hidden: int, by_rank: bool) -> tuple[int, ...]:
        if self.group.algorithm == "ht":
            return self.num_recv_tokens, hidden
        return low_latency_shape(self.group, hidden, by_rank)

    def _results(self, tokens: torch.Tensor) -> torch.Tensor:
        shape: tuple[int | str, ...] = ("n", "H")
        if self.group.algorithm == "ll":
            shape = (*self._received_shape(0, self._by_rank)[:-1], "H")
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

    def __enter__(self) -> EpHandle[Mode]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        cannot_be_copied(self, "group.create_handle(topk_idx) makes another")

    def __repr__(self) -> str:
        state = ", closed" if self._handle is None else ", staged" if self._staged else ""
        return (f"<EpHandle of {self.num_tokens} tokens, top-{self.top_k}{state}, "
                f"{self.group!r}>")

    # At the end of the interpreter the names that `close` needs may be None already, and the
    # process gives everything back.
    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending() and getattr(self, "_handle", None) is not None:
            self.close()

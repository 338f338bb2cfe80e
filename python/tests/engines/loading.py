"""What the tests of engines share: their folder, their own modules between stand-ins, what they ask of torch.cuda where
there is no GPU, and plain arithmetic.

NCCL_EP_ENGINES names folders with unpacked packages, separated as in PATH; scripts/engines.py makes one.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

FP8 = torch.float8_e4m3fn


def folder(file: str, fetched_by: str = "make test-engines") -> pathlib.Path:
    """The folder that has this file: one of NCCL_EP_ENGINES, or one below, the last name first."""
    for top in filter(None, os.environ.get("NCCL_EP_ENGINES", "").split(os.pathsep)):
        for each in (pathlib.Path(top), *sorted(pathlib.Path(top).glob("*/"), reverse=True)):
            if (each / file).exists():
                return each
    pytest.skip(f"NCCL_EP_ENGINES names no folder with {file}, which `{fetched_by}` fetches")


class Anything:
    """Any name of a stand-in: false, a base class, or a decorator with arguments."""

    def __init__(self, *_, **__): ...

    def __call__(self, function=None, *_, **__):
        return function

    def __bool__(self):
        return False


class StandIn(ModuleType):
    """A module that has a class of any name, but for the modules that its finder knows and what these are told."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__spec__.loader.knows(f"{self.__name__}.{name}"):
            return importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, type(name, (Anything,), {}))
        return getattr(self, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an engine's own files, and a stand-in for each other module of it."""

    def __init__(self, place: pathlib.Path, own: Collection[str], told: Mapping[str, Mapping[str, Any]]) -> None:
        self.place, self.own, self.told = place, own, told
        self.top = next(iter(own)).split(".")[0]

    def knows(self, name: str) -> bool:
        return name in self.own or name in self.told

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != self.top:
            return None
        if name in self.own:
            file = self.place.joinpath(*name.split("."))
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        vars(module).update(self.told.get(module.__name__, {}))


def forget(*tops: str) -> None:
    """Packages that others may import anew, from elsewhere."""
    for name in [each for each in sys.modules if each.partition(".")[0] in tops]:
        del sys.modules[name]


@contextlib.contextmanager
def modules(place: pathlib.Path, own: Collection[str], told: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Within it an engine's modules can be imported: `own` are its files, others have what `told` says of them."""
    finder = Finder(place, own, told)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        forget(finder.top)


class Idle:
    """A stream or an event where there are none: all that is enqueued has been done."""

    cuda_stream = 0

    def __init__(self, *_, **__): ...

    def record(self, *_):
        return self

    wait = wait_event = wait_stream = synchronize = record_event = record


def answer(patch: pytest.MonkeyPatch, owner, **answers) -> None:
    """Functions that give the same to all."""
    for name, value in answers.items():
        patch.setattr(owner, name, lambda *_, value=value, **__: value)


def without_gpu(patch: pytest.MonkeyPatch, device: torch.device, current_device: int | torch.device = 0) -> bool:
    """On the CPU, has torch.cuda answer what engines ask of it beside the communication; true if so."""
    if device.type != "cpu":
        return False
    streams = threading.local()
    patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(streams, "now", stream))
    patch.setattr(torch.cuda, "current_stream", lambda *_: vars(streams).setdefault("now", Idle()))
    for owner, name in ((torch.cuda, "Stream"), (torch.cuda, "Event"), (torch, "Event")):
        patch.setattr(owner, name, Idle)
    answer(patch, torch.cuda, current_device=current_device, stream=contextlib.nullcontext(),
           device=contextlib.nullcontext(), is_available=False, is_current_stream_capturing=False)
    answer(patch, torch.Tensor, record_stream=None)
    return True


def quantized(x: torch.Tensor, size: int, powers: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 with a float32 scale for `size` elements, which may have to be a power of two."""
    blocks = x.float().unflatten(1, (-1, size))
    scales = blocks.abs().amax(dim=2).clamp(min=1e-4) / 448
    if powers:
        scales = torch.exp2(torch.log2(scales).ceil())
    return (blocks / scales[..., None]).flatten(1).to(FP8), scales


def routing(random: torch.Generator, tokens: int, experts: int, top_k: int, lost: float) -> list[torch.Tensor]:
    """Ids, some of them -1, and weights."""
    ids = torch.rand((tokens, experts), generator=random).argsort(1)[:, :top_k].contiguous()
    ids[torch.rand(ids.shape, generator=random) < lost] = -1
    return [ids, torch.rand(ids.shape, generator=random)]

#!/usr/bin/env python3
"""Fetches files of the engines that python/tests/engines runs, as they are published, into a folder.

Packages are those of PyPI, or of the index that PIP_INDEX_URL names, with their hashes. Of each only the files that the
tests load stay, in a folder of its own; a stamp in it tells a second run that nothing is missing. Needs Python alone.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import fnmatch
import hashlib
import http.client
import json
import os
import pathlib
import shutil
import ssl
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator

_PATIENCE = 60  # seconds without a byte
_FORMAT = "application/vnd.pypi.simple.v1+json"


@dataclasses.dataclass(frozen=True)
class Release:
    """A file of an index, and patterns of what is needed of it, below the top folder of a source distribution."""

    file: str
    sha256: str
    wanted: tuple[str, ...]
    large: bool = False  # only with --large

    @property
    def package(self) -> str:
        return self.file.partition("-")[0].replace("_", "-")

    @property
    def folder(self) -> str:
        return "-".join(self.file.removesuffix(".tar.gz").split("-")[:2])

    @property
    def stamp(self) -> str:
        return hashlib.sha256(repr((self.sha256, self.wanted)).encode()).hexdigest()


_VLLM = "vllm/model_executor/layers/fused_moe"
# Of Python code alone, so a release for one machine and one version of Python serves all.
RELEASES = (
    Release("sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl",
            "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
            ("sglang/srt/environ.py", "sglang/srt/batch_overlap/*.py", "sglang/srt/layers/moe/__init__.py",
             "sglang/srt/layers/moe/utils.py", "sglang/srt/layers/moe/token_dispatcher/*.py",
             "sglang/srt/layers/moe/moe_runner/deep_gemm.py", "sglang/kernels/ops/moe/ep_moe_kernels.py",
             "sglang/srt/model_executor/runner_utils/deepep_adapter.py")),
    Release("vllm-0.33.0.tar.gz", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
            ("vllm/envs.py", "vllm/utils/import_utils.py", "vllm/utils/math_utils.py", "vllm/v1/worker/ubatching.py",
             "vllm/distributed/device_communicators/base_device_communicator.py",
             "vllm/distributed/device_communicators/all2all.py", f"{_VLLM}/all2all_utils.py",
             f"{_VLLM}/modular_kernel.py", f"{_VLLM}/topk_weight_and_reduce.py",
             f"{_VLLM}/prepare_finalize/deepep_*.py", "tests/kernels/moe/test_deepep_v2_async_finalize.py")),
    Release("megatron_core-0.19.2.tar.gz", "de643eee32007a7504ad52f061103fe7432503603b6321c16c861eb67dbd3353",
            ("megatron/core/*.py",)),
    Release("megatron_core-0.16.1.tar.gz", "86522feacfa5ef384a6ac627e7d88cf4866811aed3bc9b6c2a85cbf15cff91a3",
            ("megatron/core/*.py",)),
    Release("flashinfer_python-0.7.2.post1-py3-none-any.whl",
            "bfdc18b9e1e4d8d0730fe4343dc0e284cd0c160086de80f99888bc4867922d49",
            # But for kernel_src/, which has most of it.
            ("flashinfer/moe_ep/[!k]*.py", "flashinfer/api_logging.py", "flashinfer/fi_trace.py")),
    Release("transformer_engine-2.20.2-py3-none-any.whl",
            "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094", ("transformer_engine/pytorch/ep.py",)),
    Release("transformer_engine_cu13-2.20.2-py3-none-manylinux_2_28_x86_64.whl",
            "30063d3699e779cce63617c3458804f7a504ce8279f2749c98313db9daae273e",
            ("transformer_engine/wheel_lib/libtransformer_engine.so",), large=True),
)


class Refused(Exception):
    """What the user is told."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--large", action="store_true", help="also TransformerEngine's library, of 276 MB to fetch")
    arguments = parser.parse_args()
    try:
        for release in RELEASES:
            if arguments.large or not release.large:
                fetch(release, arguments.folder)
    except (OSError, ValueError, http.client.HTTPException, Refused) as error:
        print(f"engines: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(release: Release, folder: pathlib.Path) -> None:
    """Fills the release's folder, unless it is there; what is interrupted leaves nothing that looks finished."""
    place = folder / release.folder
    stamp = place / ".stamp"
    if stamp.exists() and stamp.read_text() == release.stamp:
        return
    print(f"engines: fetching {release.file}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        archive, made = pathlib.Path(scratch, release.file), pathlib.Path(scratch, "files")
        found = download(address(release), archive)
        if found != release.sha256:
            raise Refused(f"{release.file} has the hash {found} instead of {release.sha256}")
        unpack(archive, made, release.wanted)
        (made / ".stamp").write_text(release.stamp)
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)


def address(release: Release) -> str:
    """Where the index says that the file is."""
    index = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    page = f"{index.rstrip('/')}/{release.package}/"
    with _open(page, {"Accept": _FORMAT}) as answer:
        text, shown = answer.read(), answer.url
    try:
        files = json.loads(text)["files"]
    except (ValueError, KeyError) as error:
        raise Refused(f"{shown} does not answer in JSON (PEP 691); without PIP_INDEX_URL PyPI is asked") from error
    for each in files:
        if each["filename"] == release.file:
            return urllib.parse.urljoin(page, each["url"])
    raise Refused(f"{shown} does not list {release.file}")


def download(url: str, to: pathlib.Path) -> str:
    """Writes the file and returns its hash."""
    digest = hashlib.sha256()
    with _open(url, {}) as answer, to.open("wb") as file:
        while piece := answer.read(1 << 20):
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def _open(url: str, headers: dict[str, str]):
    """An answer, also where a name and a password are in the address; no text shows these."""
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    url = parts._replace(netloc=host).geturl()
    request = urllib.request.Request(url, headers=headers)
    if user:
        encoded = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    # pip's certificates count, too.
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    try:
        return urllib.request.urlopen(request, timeout=_PATIENCE, context=context)
    except (OSError, http.client.HTTPException) as error:
        raise Refused(f"cannot fetch {url}: {error}. These tests need the files of the engines, from this index or, if "
                      "NCCL_EP_ENGINES names it, in a folder") from error


def unpack(archive: pathlib.Path, to: pathlib.Path, wanted: tuple[str, ...]) -> None:
    """Writes the files whose names fit a pattern, in which * is also for several folders."""
    missing = set(wanted)
    for name, data in _members(archive, wanted):
        target = to / name
        if ".." in target.parts:
            raise Refused(f"{archive.name} has a file {name}")
        missing -= {pattern for pattern in wanted if fnmatch.fnmatchcase(name, pattern)}
        target.parent.mkdir(parents=True, exist_ok=True)
        with data, target.open("wb") as file:
            shutil.copyfileobj(data, file)
    if missing:
        raise Refused(f"{archive.name} has no {', '.join(sorted(missing))}")


def _members(archive: pathlib.Path, wanted: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    def fits(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)

    if archive.name.endswith(".whl"):
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.open(name)) for name in wheel.namelist() if fits(name))
        return
    with tarfile.open(archive) as sources:
        for member in sources:
            name = member.name.partition("/")[2]
            if member.isfile() and fits(name):
                yield name, sources.extractfile(member)


if __name__ == "__main__":
    sys.exit(main())

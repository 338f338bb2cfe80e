#!/usr/bin/env python3
"""Writes the licences of the crates that are linked into libnccl_ep, to a file or to standard output.

Reads what cargo knows of the locked dependencies, and the licence files in its registry. Fails if a crate
has none; with --check it writes nothing.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
_LIBRARY = "nccl-ep"
_LICENCES = re.compile(r"(?i)^(licen[cs]e|copying|notice|unlicense)")
_RULE = "-" * 80
_HEAD = """Third-party notices of NCCL EP

libnccl_ep contains the Rust crates below, each under the licences that it names; where several are
joined by OR, NCCL EP takes any. It also contains the standard library of Rust (MIT OR Apache-2.0,
https://www.rust-lang.org). Written by scripts/third_party.py.
"""


def linked_crates() -> list[dict]:
    """cargo's records of the crates in the library, without those of this project."""
    words = ("cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", "x86_64-unknown-linux-gnu")
    facts = json.loads(subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    packages = {package["id"]: package for package in facts["packages"]}
    nodes = {node["id"]: node for node in facts["resolve"]["nodes"]}
    todo = [key for key, package in packages.items() if package["name"] == _LIBRARY]
    found: set[str] = set()
    while todo:
        key = todo.pop()
        if key in found:
            continue
        found.add(key)
        for edge in nodes[key]["deps"]:
            # Neither tests nor build scripts, nor macros, are in the library.
            normal = any(kind["kind"] is None for kind in edge["dep_kinds"])
            macro = any("proc-macro" in target["kind"] for target in packages[edge["pkg"]]["targets"])
            if normal and not macro:
                todo.append(edge["pkg"])
    crates = [packages[key] for key in found if packages[key]["source"]]
    return sorted(crates, key=lambda crate: (crate["name"], crate["version"]))


def title(crate: dict) -> str:
    """The line that a crate has in the file."""
    return f"{crate['name']} {crate['version']} ({crate['license']})"


def licences(crate: dict) -> list[pathlib.Path]:
    folder = pathlib.Path(crate["manifest_path"]).parent
    return [path for path in sorted(folder.iterdir()) if _LICENCES.match(path.name) and path.is_file()]


def text(crates: list[dict]) -> str:
    """The file. Texts that several crates share stand there once."""
    owners: dict[str, list[str]] = {}
    for crate in crates:
        for path in licences(crate):
            owners.setdefault(path.read_text(errors="replace").strip(), []).append(crate["name"])
    listed = "\n".join(f"  {title(crate)}" for crate in crates)
    parts = [f"{_HEAD}\n{listed}\n"]
    parts += [f"{_RULE}\n{', '.join(dict.fromkeys(names))}\n{_RULE}\n\n{words}\n" for words, names in owners.items()]
    return "\n".join(parts)


def main() -> int:
    crates = linked_crates()
    without = [title(crate) for crate in crates if not licences(crate)]
    if without or not crates:
        print(f"no text of a licence: {without or 'no crates'}", file=sys.stderr)
        return 1
    if sys.argv[1:] == ["--check"]:
        return 0
    if sys.argv[1:]:
        pathlib.Path(sys.argv[1]).write_text(text(crates))
    else:
        print(text(crates), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

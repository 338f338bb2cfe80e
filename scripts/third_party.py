#!/usr/bin/env python3
"""Writes packaging/THIRD-PARTY.txt: the licences of the crates that are linked into libnccl_ep.

Reads what cargo knows of the locked dependencies, and the licence files in its registry. With --check it
writes nothing and fails if the file lacks a crate, or has one too many.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILE = ROOT / "packaging" / "THIRD-PARTY.txt"
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
    words = ("cargo", "metadata", "--format-version", "1", "--locked",
             "--filter-platform", "x86_64-unknown-linux-gnu")
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
            macro = any("proc-macro" in target["kind"]
                        for target in packages[edge["pkg"]]["targets"])
            if normal and not macro:
                todo.append(edge["pkg"])
    crates = [packages[key] for key in found if packages[key]["source"]]
    return sorted(crates, key=lambda crate: (crate["name"], crate["version"]))


def title(crate: dict) -> str:
    """The line that a crate has in the file."""
    return f"{crate['name']} {crate['version']} ({crate['license']})"


def text(crates: list[dict]) -> str:
    """The file. Texts that several crates share stand there once."""
    owners: dict[str, list[str]] = {}
    for crate in crates:
        folder = pathlib.Path(crate["manifest_path"]).parent
        files = [path for path in sorted(folder.iterdir()) if _LICENCES.match(path.name)]
        for path in (path for path in files if path.is_file()):
            owners.setdefault(path.read_text(errors="replace").strip(), []).append(crate["name"])
    listed = "\n".join(f"  {title(crate)}" for crate in crates)
    parts = [f"{_HEAD}\n{listed}\n"]
    parts += [f"{_RULE}\n{', '.join(dict.fromkeys(names))}\n{_RULE}\n\n{words}\n"
              for words, names in owners.items()]
    return "\n".join(parts)


def main() -> int:
    crates = linked_crates()
    if sys.argv[1:] != ["--check"]:
        FILE.write_text(text(crates))
        print(f"{FILE.relative_to(ROOT)}: {len(crates)} crates")
        return 0
    listed = re.findall(r"^  (\S+ \S+ \(.*\))$", FILE.read_text().split(_RULE)[0], re.MULTILINE)
    wanted = [title(crate) for crate in crates]
    if listed != wanted:
        print(f"{FILE.name} is stale, run scripts/third_party.py: "
              f"{sorted(set(listed) ^ set(wanted))}")
    return int(listed != wanted)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Looks up every text of the library that the documents quote: the sources must be able to say it.

A text is put together from the string literals of the sources, in which braces stand for a number or for
another such text. Quotes are, in `hangs.md`, the column of texts and what begins with `..`; everywhere, lines
and code that begin with a function and a colon. `..` at an end of a quote stands for more text. `errors.md`,
which has every text, is compared by tests/error_docs.rs.

Ends with the line `N passed, N failed`, which counts quotes.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ("src", "abi/common/src", "abi/first/src")
# Fewest quotes of a document; with fewer the patterns below no longer find them.
DOCUMENTS = {"README.md": 1, "docs/several-nodes.md": 1, "docs/guide/hangs.md": 10}

_UNIT_TESTS = "#[cfg(test)]\nmod "
_COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_LINE_END = re.compile(r"\\\n\s*")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")
_VALUE = re.compile(r"\d*|\.\.")
_MORE = ".."

_BLOCK = re.compile(r"^```\n(.*?)^```", re.DOTALL | re.MULTILINE)
_OF_A_CALL = re.compile(r"^(?://)? *(ncclEp\w+: [^\n]*(?:\n {4}\S[^\n]*)*)", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")
_TABLE = re.compile(r"^\| text \|.*\n\|[-|]*\n((?:\|.*\n)+)", re.MULTILINE)

Template = tuple[str, ...]  # what stands between placeholders


def quotes(name: str, text: str) -> list[str]:
    """The texts that a document quotes, in order."""
    found = [" ".join(quote.split()) for quote in _OF_A_CALL.findall(text)]
    if name.endswith("hangs.md"):
        rows = [row for table in _TABLE.findall(text) for row in table.splitlines()]
        found += [code for row in rows for code in _CODE.findall(row.split("|")[1])]
        prose = _TABLE.sub("", _BLOCK.sub("", text))
        found += [code for code in _CODE.findall(prose) if code.startswith(_MORE)]
    return found


def templates(root: pathlib.Path = ROOT) -> Iterator[Template]:
    """The string literals of the sources, cut at their placeholders."""
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.rs")):
            if not path.stem.endswith("tests"):
                yield from templates_of(path.read_text())


def templates_of(source: str) -> Iterator[Template]:
    code = _COMMENT.sub("", source.split(_UNIT_TESTS)[0].replace("'\"'", "' '"))
    for literal in _LITERAL.findall(code):
        yield tuple(_PLACEHOLDER.split(_LINE_END.sub("", literal).replace('\\"', '"')))


class Sayings:
    """All texts that templates can be put together to, and names with a number."""

    def __init__(self, known: Iterator[Template]) -> None:
        every = set(known)
        self._literals = {pieces[0] for pieces in every if len(pieces) == 1}
        # Without a word or a mark of its own a template would join any two texts.
        self._templates = [pieces for pieces in every if len(pieces) > 1 and "".join(pieces).strip()]
        self.has = functools.cache(self._has)

    def quoted(self, quote: str) -> bool:
        """Whether a quote, which may leave out what comes before or behind, is such a text."""
        if not quote.startswith(_MORE):
            return self.has(quote)
        rest = quote.removeprefix(_MORE).strip()
        literals = ((literal,) for literal in self._literals)
        return any(self._ends(pieces, rest) for pieces in (*self._templates, *literals))

    def _has(self, text: str) -> bool:
        name, _, number = text.rpartition(" ")
        return (_VALUE.fullmatch(text) is not None or text in self._literals
                or name in self._literals and number.isdecimal()
                or any(self._says(pieces, text) for pieces in self._templates))

    def _ends(self, pieces: Template, rest: str) -> bool:
        """Whether `rest` is what a template says from some word on."""
        for number, piece in enumerate(pieces):
            for word in re.finditer(r"(?<!\S)\S", piece):
                tail = (piece[word.start():], *pieces[number + 1:])
                if tail == (rest,) or len(tail) > 1 and self._says(tail, rest):
                    return True
        return False

    def _says(self, pieces: Template, text: str) -> bool:
        first, last = pieces[0], pieces[-1]
        if len(text) < len(first) + len(last) or not (text.startswith(first) and text.endswith(last)):
            return False
        return self._fills(pieces[1:], text[len(first):])

    def _fills(self, pieces: Template, text: str) -> bool:
        """Whether placeholders, one in front of each piece, can stand for what is between them."""
        piece, rest = pieces[0], pieces[1:]
        if not rest:
            return text.endswith(piece) and self.has(text[:len(text) - len(piece)])
        at = text.find(piece)
        while at >= 0:
            if self.has(text[:at]) and self._fills(rest, text[at + len(piece):]):
                return True
            at = text.find(piece, at + 1)
        return False


def main() -> int:
    sayings = Sayings(templates())
    passed = failed = 0
    for name, fewest in DOCUMENTS.items():
        found = quotes(name, (ROOT / name).read_text())
        if len(found) < fewest:
            failed += 1
            print(f"{name}: {len(found)} quotes found, expected at least {fewest}")
        for quote in found:
            if sayings.quoted(quote):
                passed += 1
            else:
                failed += 1
                print(f"{name}: no source says `{quote}`")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

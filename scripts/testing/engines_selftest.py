"""Tests of engines.py with an index of its own on this machine."""

import functools
import hashlib
import http.server
import io
import json
import os
import pathlib
import tarfile
import tempfile
import threading
import unittest
import zipfile
from unittest import mock

import engines


class Index(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; the answer for a package is its index.html."""

    wanted = ""  # credentials

    def do_GET(self):
        if self.headers.get("Authorization", "") == self.wanted:
            super().do_GET()
        else:
            self.send_error(401)

    def log_message(self, *_): ...


class Fetching(unittest.TestCase):
    """What is needed of a wheel or a source distribution comes once, and only with the hash that is known."""

    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.root, self.into = (pathlib.Path(place.name, name) for name in ("index", "engines"))
        self.root.mkdir()
        handler = functools.partial(Index, directory=str(self.root))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = {"PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/", "no_proxy": "*"}
        patch = mock.patch.dict("os.environ", settings)
        patch.start()
        self.addCleanup(patch.stop)
        said = mock.patch("builtins.print")
        self.said = said.start()
        self.addCleanup(said.stop)

    def publish(self, file: str, wanted: tuple[str, ...], **members: str) -> engines.Release:
        path = self.root / file
        if file.endswith(".whl"):
            with zipfile.ZipFile(path, "w") as wheel:
                for name, text in members.items():
                    wheel.writestr(name.replace("__", "/") + ".py", text)
        else:
            with tarfile.open(path, "w:gz") as sources:
                for name, text in members.items():
                    info = tarfile.TarInfo("top/" + name.replace("__", "/") + ".py")
                    info.size = len(text)
                    sources.addfile(info, io.BytesIO(text.encode()))
        release = engines.Release(file, hashlib.sha256(path.read_bytes()).hexdigest(), wanted)
        (self.root / release.package).mkdir()
        self.answer(release, json.dumps({"files": [{"filename": file, "url": f"../{file}"}]}))
        return release

    def answer(self, release: engines.Release, text: str) -> None:
        (self.root / release.package / "index.html").write_text(text)

    def test_only_what_is_needed_comes_and_once(self):
        for file in ("an_engine-1.0-py3-none-any.whl", "another-1.0.tar.gz"):
            release = self.publish(file, ("a/*.py",), a__b="1", a__c__d="2", e__f="3")
            engines.fetch(release, self.into)
            made = self.into / release.folder
            self.assertEqual({str(each.relative_to(made)): each.read_text() for each in made.rglob("*.py")},
                             {"a/b.py": "1", "a/c/d.py": "2"})
            (self.root / file).unlink()
            engines.fetch(release, self.into)
            self.assertEqual([each.name for each in self.into.iterdir() if each.name.startswith("tmp")], [])

    def refused(self, release: engines.Release) -> str:
        with self.assertRaises(engines.Refused) as caught:
            engines.fetch(release, self.into)
        self.assertFalse((self.into / release.folder).exists())
        return str(caught.exception)

    def test_refusals(self):
        release = self.publish("engine-1.0.tar.gz", ("a/*.py", "g/*.py"), a__b="1")
        self.assertIn("has no g/*.py", self.refused(release))
        with (self.root / release.file).open("ab") as file:
            file.write(b"more")
        self.assertIn(f"instead of {release.sha256}", self.refused(release))
        self.answer(release, '{"files": []}')
        self.assertIn("does not list engine-1.0.tar.gz", self.refused(release))
        self.answer(release, "<html>")
        self.assertIn("does not answer in JSON", self.refused(release))
        (self.root / release.package / "index.html").unlink()
        (self.root / release.package).rmdir()
        self.assertIn("cannot fetch http://127.0.0.1", self.refused(release))

    def test_an_index_with_a_password(self):
        release = self.publish("engine-1.0.tar.gz", ("a/*.py",), a__b="1")
        index = os.environ["PIP_INDEX_URL"].replace("//", "//me%40here:secret@")
        with mock.patch.dict("os.environ", PIP_INDEX_URL=index):
            self.assertIn("cannot fetch http://127.0.0.1", self.refused(release))
            with mock.patch.object(Index, "wanted", "Basic bWVAaGVyZTpzZWNyZXQ="):
                engines.fetch(release, self.into)

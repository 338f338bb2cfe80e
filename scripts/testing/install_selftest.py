"""Tests of the installation on simulated machines; the step `scripts/self-test` runs them, too."""

import unittest

from testing.machine import Machine


class Installations(unittest.TestCase):
    """install.sh."""

    def test_an_installation_builds_nothing(self):
        machine = Machine(self)
        machine.write("Cargo.toml", 'version = "1.2.3"\n')
        self.assertIn("run `make lib` first",
                      machine.fails("scripts/install.sh", "install", f"prefix={machine.root / 'prefix'}"))
        self.assertFalse((machine.root / "prefix").exists())

    def test_settings_of_an_installation_are_checked(self):
        machine = Machine(self)
        machine.write("Cargo.toml", 'version = "1.2.3"\n')
        for words, said in ((("install", "prefix=here"), "prefix must be an absolute path, not here"),
                            (("install", "libdir=lib"), "libdir must be an absolute path, not lib"),
                            (("install", "perfix=/x"), "unknown setting perfix=/x"),
                            (("/usr/local", ""), "usage: install.sh install|uninstall")):
            self.assertIn(said, machine.fails("scripts/install.sh", *words))

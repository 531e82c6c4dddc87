"""The doctor reports a healthy machine as healthy, and gives a fix for any other."""

import importlib.metadata
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.doctor import _check_bytecode
from interlace.cli.main import app


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_healthy_machine_is_ok_line_by_line_and_nothing_is_left(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert all(line.startswith("ok ") for line in done.stdout.splitlines())
    for checked in (
        "Python 3",
        "torch ",
        "devices: ",
        "disk: ",
        "sandbox: ",
        "weights of smollm2",
        "smoke run: 2 steps",
    ):
        assert checked in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_too_old_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.0.1" if name == "torch" else real(name))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "FAIL  torch 2.0.1\n      pip install 'torch>=2.11'" in done.stdout
    assert "smoke run" not in done.stdout  # it would fail for the same reason


def test_a_package_that_is_missing_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "typer":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "FAIL  typer is not installed\n      pip install 'typer>=0.15'" in done.stdout


def test_modules_that_each_process_compiles_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(importlib.util, "cache_from_source", lambda path: str(tmp_path / Path(path).name))
    finding = _check_bytecode()
    assert "unset PYTHONDONTWRITEBYTECODE" in finding.what and finding.remedy is None
    (tmp_path / "__init__.py").touch()
    assert _check_bytecode().what == "bytecode of torch"


def test_a_full_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=2**20))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "FAIL  disk: 0.0 GiB free\n      Make room under" in done.stdout

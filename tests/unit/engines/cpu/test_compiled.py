"""Files that other users own or may write are never loaded as code."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from interlace.engines.cpu import compiled
from interlace.engines.cpu.compiled import KernelsUnavailable, load_library

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cpp").mkdir()
    found = tmp_path / "cpp" / "seven.cpp"
    found.write_text('extern "C" int seven() { return 7; }')
    return found


def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "interlace"


@needs_compiler
def test_the_cache_is_the_users_own_whatever_the_umask(source: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert load_library(source).seven() == 7
    finally:
        os.umask(before)
    assert load_library(source).seven() == 7, "from the cache"
    for path in (cache(tmp_path), *cache(tmp_path).iterdir()):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@needs_compiler
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize("is_file", [False, True])
def test_what_others_may_write_is_not_loaded(source: Path, tmp_path: Path, mode: int, is_file: bool) -> None:
    load_library(source)
    (library,) = cache(tmp_path).iterdir()
    (library if is_file else cache(tmp_path)).chmod(mode)
    with pytest.raises(KernelsUnavailable, match=r"can be written by others \(mode .*XDG_CACHE_HOME"):
        load_library(source)


@needs_compiler
def test_what_another_user_owns_is_not_loaded(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library(source)
    monkeypatch.setattr(compiled.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(KernelsUnavailable, match="belongs to another user"):
        load_library(source)

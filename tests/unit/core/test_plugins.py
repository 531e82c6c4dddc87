"""Plug-ins are found by name; an unknown name is refused with the existing ones."""

from pathlib import Path

import pytest

import interlace.core
from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, builtin_names, load_callable, load_object


def test_builtins_are_the_modules_of_the_folder() -> None:
    names = builtin_names(interlace.core, hidden=("types", "training"))
    assert {"config", "errors", "plugins"} < set(names) and not {"types", "training", "__init__"} & set(names)
    assert names == sorted(names)
    assert builtin_module("part", interlace.core, "errors") is interlace.core.errors


def test_an_unknown_builtin_names_the_nearest_and_the_way_to_bring_ones_own() -> None:
    with pytest.raises(UserError, match=r"unknown part 'error'\. Did you mean 'errors'\?.*package\.module:Name"):
        builtin_module("part", interlace.core, "error")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_colon", "not of the form package.module:Name"),
        (":Name", "not of the form package.module:Name"),
        ("package:", "not of the form package.module:Name"),
        ("..package:Name", "not of the form package.module:Name"),
        ("interlace.core.nothing:Name", "cannot import 'interlace.core.nothing'"),
        ("interlace.core.errors:UserEror", "Did you mean 'UserError'?"),
    ],
)
def test_a_users_own_that_is_not_there(spec: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        load_object("reward", spec)
    assert message in str(raised.value) and "__" not in str(raised.value)
    assert "reward" in str(raised.value)


def test_a_users_own_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_reward.py").write_text("def score(text):\n    return len(text)\n\nLIMIT = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # so that the path is taken back afterwards
    assert load_callable("reward", "my_own_reward:score")("four") == 4
    with pytest.raises(UserError, match="is a int, not something that can be called"):
        load_callable("reward", "my_own_reward:LIMIT")
    (tmp_path / "my_half_reward.py").write_text("def score(text:\n")
    with pytest.raises(UserError, match=r"cannot import 'my_half_reward': .*my_half_reward\.py, line 1"):
        load_callable("reward", "my_half_reward:score")


@pytest.mark.parametrize(
    ("text", "raised"),
    [("LIMIT = limt + 1\n", "NameError: name 'limt' is not defined"), ("raise SystemExit(3)\n", "SystemExit: 3")],
)
def test_a_users_own_module_that_raises_is_told_with_its_line(
    text: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_raising_reward.py").write_text(f"import math\n{text}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=rf"cannot import .*my_raising_reward\.py, line 2, raises {raised}\."):
        load_callable("reward", "my_raising_reward:score")

"""Every block of code and every command of the documents is right.

Commands of `interlace` are parsed by the real command line, and their recipes and overrides pass the checks of a run.
Python compiles, its imports exist, and it runs unless a comment above the block gives a reason. YAML loads through the
class that reads it.
"""

import ast
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from interlace.cli.main import app
from interlace.robots.envs.load import EnvConfig
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe, override_key, recipe_names
from interlace.run.sweep import split_values
from interlace.schedule.presets import load_schedule
from tests.house.source import ROOT, tree
from tests.support.doc_blocks import PLACEHOLDER, PROGRAMS, Block, Command, document_blocks, document_commands

FENCED = [block for block in document_blocks() if block.language != "inline"]
PYTHON = [block for block in FENCED if block.language == "python" and not block.page.startswith("docs/reference/")]
YAML = [block for block in FENCED if block.language == "yaml"]
LANGUAGES = {"bash", "json", "python", "text", "yaml"}
FILES = {block.text.split()[1]: block.text for block in FENCED if re.match(r"# [a-z_]+\.(py|yaml)\n", block.text)}
"""Files that the documents show, by the name in their first line."""
COMMANDS = [command for command in document_commands() if command.words[0] == "interlace"]
OTHERS = [command for command in document_commands() if command.words[0] != "interlace"]
NOT_LOADED = ("watch", "report", "export", "scale", "engines", "presets", "recipes", "init", "serve", "advise")
"""Commands whose first argument is no recipe."""


OF_THE_READER = ("interlace/algorithms/best.py", "docs/algorithms/best.md")
"""Files that the example of CONTRIBUTING.md adds."""
ROLES = ("rollout", "env", "reward", "reference", "critic", "actor", "world_model", "judge")
FREE = (
    "schedule.granularity.judge.",
    "model.base_model.",
    "reward.shaping.weights.",
    "task.columns.",
    "recovery.restarts_per_hour.",
    "critic.optimizer.",
    "warmup.optimizer.",
    "sampling.logit_bias.",
    "episode.env.settings.",
    "task.heldout_sets.",
)
"""Sections whose keys are free or belong to a choice."""
ALL_KEYS = ("docs/reference/settings.md", "docs/reference/metrics.md", "docs/reference/api.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the files that the documents show."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)  # of another test
    rows = "".join(f'{{"prompt": "{number} + 1", "answer": "{number + 1}"}}\n' for number in range(64))
    for name in ("questions.jsonl", "hard.jsonl", "rows.jsonl"):
        (tmp_path / name).write_text(rows, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for place in (tmp_path, ROOT / "examples"):
        monkeypatch.syspath_prepend(str(place))
    return tmp_path


def test_every_fence_names_its_language() -> None:
    wrong = [f"{block}: {block.language!r}" for block in FENCED if block.language not in LANGUAGES]
    assert not wrong, f"write one of {sorted(LANGUAGES)}: {wrong}"
    assert len(COMMANDS) > 100 and len(PYTHON) > 20 and len(YAML) > 15, "the collector finds the blocks"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles_and_its_imports_exist(block: Block, folder: Path) -> None:
    code = compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    for node in ast.walk(code):
        match node:
            case ast.Import(names=names):
                for name in names:
                    importlib.import_module(name.name)
            case ast.ImportFrom(module=str(module), names=names):
                found = importlib.import_module(module)
                missing = [name.name for name in names if not hasattr(found, name.name)]
                assert not missing, f"{block}: {module} has no {missing}"


@pytest.mark.parametrize("block", [block for block in PYTHON if block.note("example") is None], ids=str)
def test_python_runs(block: Block, folder: Path) -> None:
    exec(compile(block.text, str(block), "exec"), {"__name__": "example"})


def test_the_loop_of_the_readme_is_the_loop_of_the_package() -> None:
    """Except for docstring and comments."""
    shown = next(block for block in PYTHON if block.page == "README.md" and "async def" in block.text)
    body = [node for node in tree(ROOT / "interlace/flows/policy.py").body if isinstance(node, ast.AsyncFunctionDef)]
    assert list(map(ast.dump, ast.parse(shown.text).body[0].body)) == list(map(ast.dump, body[0].body[1:]))  # type: ignore[attr-defined]


@pytest.mark.parametrize("block", [block for block in FENCED if block.language == "json"], ids=str)
def test_json_can_be_read(block: Block) -> None:
    assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


@pytest.mark.parametrize("block", YAML, ids=str)
def test_yaml_loads_through_its_class(block: Block, folder: Path) -> None:
    parts = [block.text]
    if len(set(re.findall(r"^(\w+):", block.text, re.MULTILINE))) < len(re.findall(r"^\w+:", block.text, re.MULTILINE)):
        parts = block.text.splitlines()  # a key occurs twice: each line is an alternative
    for part in parts:
        data = yaml.safe_load(part)
        if "placement" in data:
            (folder / "schedule.yaml").write_text(part)
            load_schedule("schedule.yaml")
        elif "env" in data:
            EnvConfig.parse(data["env"])
        elif "steps" in data:
            (folder / "whole.yaml").write_text(part)
            check_settings(load_recipe("whole.yaml"))
        else:
            overrides = [f"{key}={json.dumps(value)}" for key, value in data.items()]
            assert load_recipe(block.note("recipe") or "quickstart", overrides)


def command_group() -> TyperGroup:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group


def parsed(words: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Returns the command and its arguments as the command line reads them. Raises the errors of the command line."""
    group = command_group()
    with group.make_context("interlace", [], resilient_parsing=True) as context:
        name, command, rest = group.resolve_command(context, list(words[1:]))
        assert name is not None and command is not None
        with command.make_context(name, rest, parent=context) as inner:
            return name, dict(inner.params)


def without_placeholders(settings: list[str] | None) -> list[str]:
    """Returns the settings that contain no word for which the reader writes a value."""
    return [one for one in settings or () if not PLACEHOLDER.search(one)]


def recipe_of(name: str, params: dict[str, Any]) -> str | None:
    """Returns the recipe that a command reads; None if it reads none. A run of the reader has the tutorial's recipe."""
    given = params.get("recipe") or params.get("run_or_model") or "quickstart"
    if name in NOT_LOADED or given == "RUN":
        return None
    if given == "RECIPE":
        return "quickstart"
    return given if given in recipe_names() or Path(given).exists() else "mine.yaml"


def command_problem(command: Command) -> str | None:
    """Returns what is wrong with a command of interlace; None if nothing is."""
    words = command.words
    if len(words) == 2 or words[1].startswith("--"):  # names a command, or an option of all commands
        known = words[1] in command_group().commands or words[1] in ("--install-completion", "--help")
        return None if known else f"there is no command {words[1]}"
    try:
        name, params = parsed(words)
        spec = recipe_of(name, params) if command.block.note("example") is None else None
        settings = without_placeholders(params.get("overrides") or params.get("settings"))
        if name == "sweep":
            settings = [f"{override_key(one)}={split_values(one)[0]}" for one in settings]
        if spec is not None:
            check_settings(load_recipe(spec, settings))
    except Exception as error:  # errors of the command line have no common public class
        return None if "pip install" in str(error) else str(error)
    return None


@pytest.mark.parametrize("page", sorted({command.block.page for command in COMMANDS}))
def test_interlace_commands_are_accepted(page: str, folder: Path) -> None:
    found = [(command, command_problem(command)) for command in COMMANDS if command.block.page == page]
    wrong = [f"{command}: {problem}" for command, problem in found if problem]
    assert not wrong, "\n".join(wrong)


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"])


def problems(command: Command) -> Iterator[str]:
    """Yields what is wrong with a command of another program."""
    program, *words = command.words
    if program not in PROGRAMS and not program.startswith("$"):
        yield f"{program} is not a program that this test checks"
    if program == "make":
        yield from (f"no target {word}" for word in words if "=" not in word and word not in make_targets())
    for word in words:
        for extra in (re.search(r"^(?:interlace|\.)\[([\w,]+)\]$", word) or [None, ""])[1].split(","):
            if extra and extra not in extras():
                yield f"no extra {extra}"
        path, _, test = word.partition("::")
        if re.match(r"(benchmarks|docs|examples|interlace|tests)/", path) and not PLACEHOLDER.search(path):
            if "*" not in path and not (ROOT / path).exists():
                yield f"no file {path}"
            elif test and f"def {test}(" not in (ROOT / path).read_text(encoding="utf-8"):
                yield f"no test {test} in {path}"
    script = next((ROOT / word for word in words if word.endswith(".py") and (ROOT / word).exists()), None)
    if program == "python" and script is not None:
        text = script.read_text(encoding="utf-8")
        yield from (
            f"{script.name} has no option {word}" for word in words if re.match("--[a-z]", word) and word not in text
        )


def test_other_commands_name_targets_files_and_options_that_exist() -> None:
    wrong = [f"{command}: {', '.join(found)}" for command in OTHERS if (found := list(problems(command)))]
    assert len(OTHERS) > 50 and not wrong, "\n".join(wrong)


def test_paths_in_sentences_exist() -> None:
    missing = []
    for block in document_blocks():
        path, _, name = block.text.partition("::")
        path = path.partition(":")[0]
        is_path = re.fullmatch(r"(benchmarks|docs|examples|interlace|tests)/[\w./-]*", path)
        if block.language != "inline" or not is_path or PLACEHOLDER.search(path) or path in OF_THE_READER:
            continue
        found = ROOT / path
        if not found.exists() or (name and f"def {name}(" not in found.read_text(encoding="utf-8")):
            missing.append(f"{block}: {block.text}")
    assert not missing


def test_settings_in_sentences_exist() -> None:
    listed = (ROOT / "docs/reference/settings.md").read_text(encoding="utf-8")
    keys = set(re.findall(r"^\| \[?`([\w.]+)`", listed, re.MULTILINE))
    keys |= {key.replace("placement.ROLE", f"placement.{role}") for key in keys for role in ROLES}
    sections = {key + "." for key in keys}
    unknown = []
    for block in document_blocks():
        key = block.text.partition("=")[0]
        if block.language != "inline" or block.page in ALL_KEYS or not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key):
            continue
        if key.partition(".")[0] not in Recipe.model_fields or re.search(r"\.(py|yaml|json|jsonl|safetensors)$", key):
            continue
        if (
            key not in keys
            and not any((key + ".").startswith(section) for section in FREE)
            and key + "." not in sections
        ):
            unknown.append(f"{block}: {key}")
    assert not unknown

"""The repository names no machine, links between documents work, and CI runs the test command."""

import re
from pathlib import Path

from tests.house.source import ROOT

# Put together here, so that this file is not its own finding.
FOREIGN_PATHS = tuple("/" + "/".join(parts) for parts in (("work", ""), ("tmp", "bash"), ("root", ".")))
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".jsonl", ".cfg", ".sh", ".html", ".cpp", ""}
FOLDERS = ("interlace", "tests", "docs", "benchmarks", ".ci")


def texts() -> list[Path]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    # In a second working tree `.git` is a file, with the path of the first in it.
    here = [path for path in ROOT.iterdir() if path.name != ".git"]
    found = [path for path in [*here, *inside] if path.is_file() and path.suffix in TEXT]
    return [path for path in found if "__pycache__" not in path.parts]


def test_nothing_names_the_machine_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if any(foreign in line for foreign in FOREIGN_PATHS)
    ]
    assert not found, "\n".join(found)


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in texts()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_ci_runs_the_test_command() -> None:
    """CI runs `make test`, the command in the README, so that this command works. Its other parts exist as well."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^run_part .* make .*\btest$", script, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (environments,) = re.findall(r"^for environment in (.*); do$", script, re.MULTILINE)
    for name in environments.split():
        assert f"\ntest-{name}: .venv-{name}/.installed\n" in makefile
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert "\ntest:" in makefile
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")

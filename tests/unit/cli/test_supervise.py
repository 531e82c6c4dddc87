"""A supervised run is continued after a kill, and not after a request to stop."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli import supervise
from interlace.cli.main import app

ROOT = Path(__file__).parents[3]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Commands of the processes, in order. The first process is killed after it has stored its settings."""
    found: list[list[str]] = []

    def run(arguments: Sequence[str], stopped: list[int]) -> int:
        found.append([*arguments])
        (tmp_path / "runs" / "mine").mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / "mine" / "config.yaml").write_text("steps: 1\n")
        return 0 if "--resume" in arguments else -signal.SIGKILL

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "_run_process", run)
    monkeypatch.setattr(supervise, "FIRST_DELAY_S", 0.0)
    return found


def test_a_killed_run_is_resumed_without_its_settings_which_are_stored(commands: list[list[str]]) -> None:
    settings = ("schedule=areal", "schedule.sync_every=2")
    ended = CliRunner().invoke(app, ["supervise", "quickstart", *settings, "--name", "mine", "--overwrite", "--quiet"])
    assert ended.exit_code == 0, ended.output
    assert commands == [
        ["train", "quickstart", *settings, "--name", "mine", "--quiet", "--overwrite"],
        ["train", "runs/mine/config.yaml", "--name", "mine", "--quiet", "--resume"],
    ]


def test_a_process_that_was_killed_before_it_opened_its_run_starts_in_the_same_way(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, statuses = supervise._run_process, [-signal.SIGSEGV, -signal.SIGKILL]

    def die_early(arguments: Sequence[str], stopped: list[int]) -> int:
        if len(statuses) == 2:
            commands.append([*arguments])
            return statuses.pop(0)
        return run(arguments, stopped)

    monkeypatch.setattr(supervise, "_run_process", die_early)
    ended = CliRunner().invoke(app, ["supervise", "quickstart", "steps=9", "--name", "mine"])
    assert ended.exit_code == 0 and "killed by SIGSEGV" in ended.output
    assert [command[2] for command in commands] == ["steps=9", "steps=9", "--name"]


def test_after_a_request_to_stop_no_process_is_started(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = supervise._run_process

    def stop(arguments: Sequence[str], stopped: list[int]) -> int:
        stopped.append(signal.SIGTERM)
        return run(arguments, stopped)

    monkeypatch.setattr(supervise, "_run_process", stop)
    ended = CliRunner().invoke(app, ["supervise", "quickstart", "--name", "mine"])
    assert ended.exit_code == 128 + signal.SIGKILL and len(commands) == 1


def test_a_run_that_is_killed_each_time_ends_with_the_signal(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(arguments: Sequence[str], stopped: list[int]) -> int:
        commands.append([*arguments])
        return -signal.SIGKILL

    monkeypatch.setattr(supervise, "_run_process", die)
    ended = CliRunner().invoke(app, ["supervise", "quickstart", "--name", "mine", "--restarts", "2"])
    assert ended.exit_code == 137 and len(commands) == 3 and "No start is left" in ended.output


def test_two_supervisors_that_start_at_once_train_two_runs(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start_another(arguments: Sequence[str], stopped: list[int]) -> int:
        commands.append([*arguments])
        if len(commands) == 1:
            CliRunner().invoke(app, ["supervise", "quickstart"])
        return 2

    monkeypatch.setattr(supervise, "_run_process", start_another)
    CliRunner().invoke(app, ["supervise", "quickstart"])
    assert [command[2:] for command in commands] == [
        ["--name", "quickstart", "--overwrite"],
        ["--name", "quickstart-2", "--overwrite"],
    ]
    assert not [*(tmp_path / "runs").glob("*")], "a refused command leaves no empty folder"


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
@pytest.mark.parametrize("ends", [True, False])
def test_a_restart_waits_for_the_processes_of_the_killed_command(tmp_path: Path, ends: bool) -> None:
    """A rank may outlive a killed command and hold memory. One that does not end is killed."""
    program = tmp_path / "interlace"
    program.mkdir()
    (program / "__init__.py").touch()
    rank = "import pathlib, sys, time; time.sleep(float(sys.argv[1])); pathlib.Path('rank-ended').touch()"
    (program / "__main__.py").write_text(
        "import os, signal, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {rank!r}, {'1.0' if ends else '1000'!r}], start_new_session=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from interlace.cli import supervise\n"
        f"import os; os.chdir({str(tmp_path)!r}); os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
        f"supervise.ENDING_S = {30 if ends else 0.2}\n"
        "stopped = []; status = supervise._run_process([], stopped)\n"
        "from pathlib import Path; from interlace.observe.run_folder import RunFolder\n"
        "run = RunFolder(path=Path('run'))\n"
        "print(status, len(supervise._list_orphans([], run)))\n"
        "supervise._wait_for_end(0.0, [], run, stopped)\n"
        "print(len(supervise._list_orphans([], run)), os.path.exists('rank-ended'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.splitlines() == ["-9 1", f"0 {ends}"]


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
def test_a_restart_leaves_the_servers_of_its_run_for_adoption(tmp_path: Path) -> None:
    program = tmp_path / "interlace"
    program.mkdir()
    (program / "__init__.py").touch()
    for name in ("mine", "other"):
        (tmp_path / "runs" / name / "engines").mkdir(parents=True)
        (tmp_path / "runs" / name / "engines" / "rollout-1.json").touch()  # it was rollout-0.json at first
    (program / "__main__.py").write_text(
        "import os, signal, subprocess, sys\n"
        "for run in ('mine', 'other'):\n"
        "    guard = ['import time; time.sleep(60)', '60', os.path.abspath(f'runs/{run}/engines/rollout-0.json')]\n"
        "    subprocess.Popen([sys.executable, '-c', *guard], start_new_session=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from interlace.cli import supervise\n"
        "from interlace.core.processes import list_children\n"
        "from interlace.observe.run_folder import RunFolder\n"
        "from pathlib import Path\n"
        f"import os; os.chdir({str(tmp_path)!r}); os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
        "supervise.ENDING_S = 0.5\n"
        "stopped = []; supervise._run_process([], stopped)\n"
        "supervise._wait_for_end(0.0, [], RunFolder(path=Path('runs/mine')), stopped)\n"
        "for process in list_children():\n"
        "    print(Path(f'/proc/{process}/cmdline').read_text().split(chr(0))[4]); os.kill(process, 9)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.splitlines() == [str(tmp_path / "runs/mine/engines/rollout-0.json")]


def test_a_signal_to_the_supervisor_reaches_its_process_once(tmp_path: Path) -> None:
    """The process has a session of its own, so that a scheduler's signal to all processes of a job comes once."""
    program = tmp_path / "interlace"
    program.mkdir()
    (program / "__init__.py").touch()
    (program / "__main__.py").write_text(
        "import signal, sys, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, lambda number, _: (print('got', number, flush=True)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(1.5)\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from interlace.cli.supervise import _run_process\n"
        f"import os; os.chdir({str(tmp_path)!r}); os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
        "stopped = []; print('ended', _run_process([], stopped), stopped)"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert started.stdout and started.stdout.readline() == "ready\n"
    os.killpg(started.pid, signal.SIGTERM)
    os.kill(started.pid, signal.SIGINT)
    output, _ = started.communicate(timeout=60)
    ended, *got = sorted(output.splitlines())
    assert got == ["got 15", "got 2"]
    assert ended in ("ended 0 [15, 2]", "ended 0 [2, 15]")

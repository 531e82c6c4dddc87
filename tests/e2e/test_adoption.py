"""After SIGKILL of the command, `--resume` adopts the engine servers that the killed command had started."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from interlace.engines.rollout.services.adoption import ServerRecord
from interlace.engines.rollout.services.process import find_guards
from interlace.observe.progress import QuietProgress
from tests.support.processes import all_gone, children, handles, running
from tests.support.ray_nodes import ray_node
from tests.support.training import (
    REPOSITORY,
    SMALL,
    equal_weights,
    final_weights,
    killed_command,
    metrics,
    run,
    samples,
    shared_cache,
)

SETTINGS = ("warmup=null", "evaluation.num_prompts=1", "cluster.threads_per_worker=1", "checkpoint_every=2")
ENGINE = "rollout={engine: interlace, lease_s: 300}"
LIMIT_S = 400.0


class Lines(QuietProgress):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def kill_run(root: Path, settings: Sequence[str]) -> list[int]:
    """Trains `x` in a process until its second step is saved, and kills it. Returns handles of its servers."""
    with killed_command(root, settings, limit_s=LIMIT_S) as process:
        return handles(running(process, "interlace-server-"))


@pytest.mark.slow
@pytest.mark.parametrize("change", ["", "cluster.threads_per_worker=2"])
def test_a_resumed_run_adopts_the_servers_of_the_killed_one_unless_its_recipe_has_changed(
    tmp_path: Path, change: str
) -> None:
    servers = kill_run(tmp_path, [*SETTINGS, ENGINE])
    assert len(servers) == 4  # for each core a guard, and the server that it runs
    records = sorted((tmp_path / "runs/x/engines").glob("rollout-*.json"))
    folders = [Path(ServerRecord.model_validate_json(each.read_text()).folder) for each in records]
    newest = max(int(path.name.removeprefix("step_")) for path in (tmp_path / "runs/x/checkpoints").glob("step_*"))
    steps = f"steps={newest + 2}"
    settings, lines = [*SETTINGS, ENGINE, steps, *([change] if change else [])], Lines()
    run(tmp_path / "runs", "x", settings, resume=True, progress=lines)
    adopted = [sentence for sentence in lines.said if "which runs already, is adopted" in sentence]
    ended = [sentence for sentence in lines.said if "is not adopted, and was ended: its command" in sentence]
    assert (len(adopted), len(ended)) == ((0, 2) if change else (2, 0)), lines.said
    assert all_gone(servers, 30.0) and not any(folder.exists() for folder in folders)
    assert not [*(tmp_path / "runs/x/engines").glob("rollout-*.json")]
    for handle in servers:
        os.close(handle)
    if change:  # the number of threads may change bits
        return
    run(tmp_path, "whole", [*SETTINGS, steps])
    assert samples(tmp_path / "runs", "x") == samples(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path / "runs", "x"), final_weights(tmp_path, "whole"))


@pytest.mark.slow
def test_an_engine_adopts_a_server_that_had_another_number(tmp_path: Path) -> None:
    """The resumed run has one engine, and only the server of the other engine runs."""
    servers, engines = kill_run(tmp_path, [*SETTINGS, ENGINE]), tmp_path / "runs/x/engines"
    guards = {number: guard for guard, number in find_guards(engines).items()}
    url = ServerRecord.model_validate_json((engines / "rollout-1.json").read_text()).url
    os.kill(guards[0], signal.SIGKILL)
    newest = max(int(path.name.removeprefix("step_")) for path in (tmp_path / "runs/x/checkpoints").glob("step_*"))
    settings, lines = [*SETTINGS, ENGINE, f"steps={newest + 2}", "cluster.devices=cpu:1"], Lines()
    run(tmp_path / "runs", "x", settings, resume=True, progress=lines)
    adopted = [sentence for sentence in lines.said if "which runs already, is adopted" in sentence]
    assert len(adopted) == 1 and url in adopted[0], lines.said
    assert all_gone(servers, 30.0) and not [*engines.glob("rollout-*.json")]
    for handle in servers:
        os.close(handle)


@pytest.mark.slow  # starts Ray twice or three times
@pytest.mark.ray
@pytest.mark.parametrize("is_joined", [False, True])
def test_a_resumed_run_on_ray_adopts_the_servers_of_the_killed_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_joined: bool
) -> None:
    """The ranks end with the command; their servers have the lease, under a Ray of the run and under one it joined."""
    with ray_node() if is_joined else nullcontext({}) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
        ray = [
            "cluster.backend=ray",
            "cluster.devices=cpu:1",
            *[f"cluster.address={address}" for address in [*variables.values()][-1:]],
        ]
        with killed_command(tmp_path, [*SETTINGS, ENGINE, *ray], limit_s=LIMIT_S):
            guards = [*find_guards(tmp_path / "runs/x/engines")]
            servers = handles([*guards, *(child for guard in guards for child in children(guard))])
            assert len(servers) == 2
        newest = max(int(path.name.removeprefix("step_")) for path in (tmp_path / "runs/x/checkpoints").glob("step_*"))
        steps = f"steps={newest + 2}"
        given = [*SMALL, shared_cache(), *SETTINGS, ENGINE, *ray, steps]
        command = [sys.executable, "-m", "interlace", "train", "quickstart", "--name", "x", "--resume", *given]
        # In a process of its own, because Ray keeps the token of the first cluster that a process joins.
        resumed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0 and resumed.stdout.count("which runs already, is adopted") == 1, resumed
    assert all_gone(servers, 30.0) and not [*(tmp_path / "runs/x/engines").glob("rollout-*.json")]
    for handle in servers:
        os.close(handle)
    run(tmp_path, "whole", [*SETTINGS, steps])
    assert samples(tmp_path / "runs", "x") == samples(tmp_path, "whole")
    assert equal_weights(final_weights(tmp_path / "runs", "x"), final_weights(tmp_path, "whole"))


@pytest.mark.slow
def test_a_resumed_run_adopts_servers_with_the_routes_of_sglang(tmp_path: Path) -> None:
    """SGLang needs a GPU, so its stand-in serves here."""
    stand_in = "'tests.support.sglang_server:StandInKind'"
    engine = [f"rollout={{engine: {stand_in}, lease_s: 300, max_tokens: 4096}}", "minibatches=1"]
    servers = kill_run(tmp_path, [*SETTINGS, *engine])
    newest = max(int(path.name.removeprefix("step_")) for path in (tmp_path / "runs/x/checkpoints").glob("step_*"))
    steps, lines = f"steps={newest + 2}", Lines()
    run(tmp_path / "runs", "x", [*SETTINGS, *engine, steps], resume=True, progress=lines)
    assert len([line for line in lines.said if "which runs already, is adopted" in line]) == 2, lines.said
    assert all(row["actor/logprob_gap"] < 1e-5 for row in metrics(tmp_path / "runs", "x"))
    assert all_gone(servers, 30.0)
    for handle in servers:
        os.close(handle)


@pytest.mark.vllm
def test_a_resumed_run_adopts_servers_of_vllm(tmp_path: Path) -> None:
    """The adopted servers have the version of the killed run until the resumed run publishes its own."""
    engine = ["rollout={engine: vllm, lease_s: 300, max_running: 16}", "model=tiny:mini", "minibatches=1"]
    servers = kill_run(tmp_path, [*SETTINGS, *engine])
    saved = (tmp_path / "runs/x/checkpoints").glob("step_*")
    steps = f"steps={max(int(path.name.removeprefix('step_')) for path in saved) + 2}"
    lines, cache = Lines(), f"model.cache_dir={tmp_path / 'cache'}"
    run(tmp_path / "runs", "x", [*SETTINGS, *engine, steps, cache], resume=True, progress=lines)
    assert len([line for line in lines.said if "which runs already, is adopted" in line]) == 2, lines.said
    assert all(row["actor/logprob_gap"] < 1e-5 for row in metrics(tmp_path / "runs", "x"))
    assert all_gone(servers, 30.0)
    for handle in servers:
        os.close(handle)

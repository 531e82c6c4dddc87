"""After SIGKILL of the command, `--resume` continues with the engine servers at an address, which kept running."""

import json
import urllib.request
from pathlib import Path

import pytest

from tests.support.engine_servers import KEY, KEY_ENV, serve
from tests.support.training import equal_weights, final_weights, killed_command, run, samples

SETTINGS = ("warmup=null", "evaluation.num_prompts=1", "cluster.threads_per_worker=1", "checkpoint_every=2")
LIMIT_S = 240.0


def version_of(url: str) -> int:
    """Returns the version that a server serves."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/engine/v1/health", data=b"{}", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: dict[str, int] = json.loads(answer.read())
    return found["version"]


@pytest.mark.slow
def test_a_resumed_run_reattaches_to_the_servers_of_the_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    run(tmp_path, "whole", [*SETTINGS, "steps=6"])
    with serve("tiny:micro", tmp_path / "server.log") as url:
        engine = f"rollout={{engine: address, urls: [{url}], key_env: {KEY_ENV}}}"
        with killed_command(tmp_path, [*SETTINGS, engine], limit_s=LIMIT_S):
            pass
        (tmp_path / "runs/x").rename(tmp_path / "x")
        killed_at = version_of(url)
        assert killed_at >= 1
        newest = max(int(path.name.removeprefix("step_")) for path in (tmp_path / "x/checkpoints").glob("step_*"))
        steps = max(newest + 2, 6)
        run(tmp_path, "x", [*SETTINGS, engine, f"steps={steps}"], resume=True)
        assert version_of(url) >= steps - 1
        if steps != 6:
            run(tmp_path, "longer", [*SETTINGS, f"steps={steps}"])
    whole = "whole" if steps == 6 else "longer"
    assert samples(tmp_path, "x") == samples(tmp_path, whole)
    assert equal_weights(final_weights(tmp_path, "x"), final_weights(tmp_path, whole))

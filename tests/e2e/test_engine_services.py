"""Training works on engine servers: at an address, started by the run, and with failures during training."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from interlace.engines.rollout.services.link import ServerLink
from interlace.observe.progress import QuietProgress
from tests.support.engine_servers import KEY, KEY_ENV, FaultyProxy, serve, wait_until
from tests.support.training import equal_weights, final_weights, metrics, run, samples

pytestmark = pytest.mark.slow
SETTINGS = ("steps=3", "warmup=null", "evaluation.num_prompts=1", "cluster.threads_per_worker=1")
ADAPTER = "actor.lora={rank: 2, target_modules: [q_proj]}"
"""Setting by which training changes few weights, so that deltas are smaller than the weights."""
QUICK = "heartbeat_s: 0.3, health_timeout_s: 2, progress_s: 3"
"""When a server counts as lost, in these tests."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def native(root: Path) -> str:
    """The run that all others have to equal, on the engine in this process."""
    run(root, "native", SETTINGS)
    return "native"


@pytest.fixture(scope="module")
def servers(root: Path) -> Iterator[tuple[str, str]]:
    """Two servers of the quick start's model."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(serve("tiny:micro", root / f"server-{number}.log")) for number in range(2))
        yield one, other


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)


class Notes(QuietProgress):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def at(*urls: str) -> str:
    return f"rollout={{engine: address, urls: [{', '.join(urls)}], key_env: {KEY_ENV}, {QUICK}}}"


def check_equal(root: Path, name: str, native: str) -> None:
    """No sample is lost or doubled: each one, and the weights, are those of the run in one process, to the bit."""
    assert samples(root, name) == samples(root, native)
    assert equal_weights(final_weights(root, name), final_weights(root, native))
    assert all(row["sched/staleness_max"] == 0 for row in metrics(root, name))


def test_an_engine_at_an_address_draws_what_the_engine_in_process_draws(
    root: Path, native: str, servers: tuple[str, str]
) -> None:
    run(root, "address", [*SETTINGS, at(servers[0])])
    check_equal(root, "address", native)


@pytest.fixture(scope="module")
def adapted(root: Path) -> str:
    """A run with an adapter on the engine in this process."""
    pytest.importorskip("peft")
    run(root, "adapted", [*SETTINGS, ADAPTER])
    return "adapted"


@pytest.mark.parametrize("transport", ["auto", "gloo", "folder"])
def test_servers_that_read_deltas_draw_what_the_engine_in_process_draws(
    root: Path, adapted: str, transport: str
) -> None:
    weights = ["weights.codec=delta", f"weights.transport={transport}", f"weights.folder={root / 'versions'}"]
    name = f"delta-{transport}"
    run(root, name, [*SETTINGS, ADAPTER, "rollout={engine: interlace, max_tokens: 8192}", *weights])
    check_equal(root, name, adapted)
    if transport == "folder":
        assert [*root.glob("versions/version-*/rank-*.safetensors")], "no delta was sent"


@pytest.mark.parametrize("fault", ["500", "hang", "cut", "version", "nan"])
def test_a_server_that_fails_loses_no_sample(root: Path, native: str, servers: tuple[str, str], fault: str) -> None:
    proxy, notes = FaultyProxy(servers[1], fault, after=3), Notes()
    try:
        run(root, f"fault-{fault}", [*SETTINGS, at(servers[0], proxy.url)], progress=notes)
    finally:
        proxy.close()
    assert proxy.num_faults == 1
    assert any("rollout/1 is lost" in text for text in notes.said), notes.said
    check_equal(root, f"fault-{fault}", native)


@pytest.mark.parametrize("moment", ["decoding", "update", "idle", "stopped"])
def test_a_server_that_is_killed_is_started_again_and_loses_no_sample(
    root: Path, native: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stopped`: by SIGSTOP, so that its connections stay open and nothing answers."""
    done: list[str] = []
    killing = signal.SIGSTOP if moment == "stopped" else signal.SIGKILL

    def strike(link: ServerLink) -> None:
        if link._process is not None and link._process.address.url == done_url(link):
            os.killpg(link._process.pid, killing)
            done.append(link.name)

    def done_url(link: ServerLink) -> str:
        return "" if done else link._process.address.url if link._process else ""

    send, load = ServerLink.send, ServerLink.load

    def sending(self: ServerLink, requests: object) -> None:
        send(self, requests)  # type: ignore[arg-type]
        if moment in ("decoding", "stopped") and self._versions.current == 1:
            strike(self)

    def loading(self: ServerLink, *arguments: object) -> None:
        if moment == "update" and self._versions.current == 1:
            strike(self)
        load(self, *arguments)  # type: ignore[arg-type]
        if moment == "idle" and self._versions.current == 1:
            strike(self)

    monkeypatch.setattr(ServerLink, "send", sending)
    monkeypatch.setattr(ServerLink, "load", loading)
    notes = Notes()
    name = f"killed-{moment}"
    placed = "schedule.placement.rollout.devices_per_instance=1"
    engine = f"rollout={{engine: interlace, {QUICK}, max_tokens: 8192}}"
    run(root, name, [*SETTINGS, engine, placed], progress=notes)
    assert len(done) == 1
    assert any("is lost" in text for text in notes.said), notes.said
    assert any("KV cache of 8,192 tokens, " in text for text in notes.said), notes.said
    check_equal(root, name, native)


def test_servers_join_and_leave_while_a_run_trains(root: Path, servers: tuple[str, str]) -> None:
    """Which engine drew a sample changes nothing of it, so a run with changes equals one without, to the bit."""
    steps, notes = "steps=48", Notes()  # the run must last until the third command is answered
    run(root, "unchanged", [*SETTINGS, steps])
    answers: list[str] = []
    commands = root / "changed" / "engines" / "commands"

    def change() -> None:
        for number, (verb, engine) in enumerate((("add", servers[1]), ("drain", servers[0]), ("drain", servers[1]))):
            wait_until(commands.is_dir)
            (commands / f"{number}.part").write_text(json.dumps({"verb": verb, "engine": engine}))
            (commands / f"{number}.part").rename(commands / f"{number}.json")
            wait_until((commands / f"{number}.answer").exists)
            answers.append((commands / f"{number}.answer").read_text())

    changing = threading.Thread(target=change)
    changing.start()
    run(root, "changed", [*SETTINGS, steps, at(servers[0])], progress=notes)
    changing.join(timeout=10)
    assert answers[0].startswith("rollout/1 serves version") and answers[1] == "rollout/0 has left", (
        answers,
        notes.said,
    )
    assert answers[2].startswith("error: rollout/1 is the last engine")
    assert samples(root, "changed") == samples(root, "unchanged")
    assert equal_weights(final_weights(root, "changed"), final_weights(root, "unchanged"))


def test_a_reference_at_an_address_gives_the_kl_of_one_in_process(root: Path) -> None:
    """The entropy bonus moves the weights although the untrained model gets no reward."""
    kl = (*SETTINGS, "algorithm.kl_coefficient=0.1", "algorithm.entropy_coefficient=0.01", "optimizer.lr=1e-3")
    run(root, "reference", [*kl])
    with serve("tiny:micro", root / "reference.log") as url:  # other servers serve the weights of earlier runs
        service = f"reference.service={{engine: address, urls: [{url}], key_env: {KEY_ENV}}}"
        run(root, "reference-service", [*kl, service])
    found = [row["actor/kl"] for row in metrics(root, "reference")]
    by_service = [row["actor/kl"] for row in metrics(root, "reference-service")]
    assert by_service == pytest.approx(found, rel=0.02, abs=1e-6)
    assert max(found) > 0

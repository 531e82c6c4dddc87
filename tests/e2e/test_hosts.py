"""Runs over two hosts: engines behind a link, a partition of the hosts, and a host that is lost."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from interlace.run.chaos.certificate import EndedKey, SampleCounts
from interlace.schedule.presets import load_schedule, preset_names
from tests.support.engine_servers import KEY, KEY_ENV
from tests.support.hosts import INTERLACE, Host, Hosts, start_ray, two_hosts, why_not
from tests.support.training import SMALL, equal_weights, final_weights, metrics, run, samples

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
SAMPLES_PER_PROMPT = 4
SETTINGS = (
    "steps=8",
    "warmup=null",
    "evaluation.num_prompts=1",
    "checkpoint_every=2",
    "cluster.threads_per_worker=1",
    f"samples_per_prompt={SAMPLES_PER_PROMPT}",
)
QUICK = "heartbeat_s: 0.3, health_timeout_s: 2, progress_s: 3"
"""Limits after which a server counts as lost."""
PARTITION_S = 6.0
"""Three times health_timeout_s, so that both hosts notice it."""
LIMIT_S = 600.0
PORTS = itertools.count(8000)


@dataclass(frozen=True, kw_only=True)
class HostRun:
    """A run of the quick start on a host, in its folder `runs`."""

    root: Path
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(self._lines()) >= step)

    def wait_for_note(self, *sentences: str) -> None:
        self.wait_until(lambda: all(sentence in self.output for sentence in sentences))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.output
            time.sleep(0.05)

    def wait_for_end(self) -> None:
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within {LIMIT_S:.0f} s: {self.output}")
        assert code == 0, self.output

    @property
    def output(self) -> str:
        return " ".join(self.log.read_text().split())

    def _lines(self) -> Sequence[str]:
        file = self.root / self.name / "metrics.jsonl"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs on one host, without faults, which check() makes."""
    return tmp_path_factory.mktemp("calm")


def start_run(
    host: Host, preset: str, *settings: str, variables: Mapping[str, str] | None = None, name: str = ""
) -> HostRun:
    name = name or preset
    log = host.folder / f"{name}.log"
    given = [*SMALL, *SETTINGS, f"schedule={preset}", f"model.cache_dir={host.folder / 'cache'}", *settings]
    command = [*INTERLACE, "train", "quickstart", "--name", name, *given]
    process = host.start(command, log, {KEY_ENV: KEY, **(variables or {})})
    return HostRun(root=host.folder / "runs", name=name, process=process, log=log)


def start_on_servers(hosts: Hosts, preset: str, *on: Host) -> HostRun:
    """Starts a run on the first host with an engine server on each host of `on`."""
    urls = ", ".join(host.serve(next(PORTS)) for host in on)
    engine = f"rollout={{engine: address, urls: [{urls}], key_env: {KEY_ENV}, {QUICK}}}"
    versions = hosts.first.folder / "versions"  # on a disk that both hosts see
    return start_run(hosts.first, preset, engine, "weights.transport=folder", f"weights.folder={versions}")


def start_on_ray(hosts: Hosts, preset: str, variables: Mapping[str, str], *settings: str, name: str = "") -> HostRun:
    """Starts a run on the first host, with one device on each host."""
    ray = ("cluster.backend=ray", f"cluster.address={variables['RAY_ADDRESS']}", "cluster.start_timeout_s=60")
    return start_run(hosts.first, preset, *ray, *settings, variables=variables, name=name)


def check(done: HostRun, calm: Path) -> None:
    """Checks that no sample is lost or doubled, the bound, and for a synchronous schedule equality to the bit."""
    ended = [
        EndedKey(int(str(row["group"])), int(str(row["index"])), str(row["event"]))
        for row in samples(done.root, done.name)
    ]
    counts, bound = SampleCounts.of(ended, SAMPLES_PER_PROMPT), load_schedule(done.name).staleness_bound
    assert (counts.lost, counts.duplicated) == (0, 0)
    rows = metrics(done.root, done.name)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert max(row["sched/staleness_max"] for row in rows) <= bound
    # With these tails, the samples that finish first are trained.
    is_race = load_schedule(done.name).tail.kind in ("oversample", "tail_batching")
    if bound == 0 and not is_race:
        if not (calm / done.name).exists():
            run(calm, done.name, [*SETTINGS, f"schedule={done.name}"])
        assert samples(done.root, done.name) == samples(calm, done.name)
        assert equal_weights(final_weights(done.root, done.name), final_weights(calm, done.name))


@pytest.mark.parametrize("preset", ["verl-colocated", "areal"])
def test_engines_behind_a_partition_lose_no_sample(hosts: Hosts, calm: Path, preset: str) -> None:
    going = start_on_servers(hosts, preset, hosts.first, hosts.second)
    going.wait_for_step(2)
    hosts.cut()
    going.wait_for_note("rollout/1 is lost")
    time.sleep(PARTITION_S)
    hosts.join()
    going.wait_for_end()
    check(going, calm)


def test_a_run_without_reachable_engines_waits_for_the_end_of_the_partition(hosts: Hosts, calm: Path) -> None:
    going = start_on_servers(hosts, "verl-colocated", hosts.second)
    going.wait_for_step(2)
    hosts.cut()
    going.wait_for_note("rollout/0 is lost")
    time.sleep(PARTITION_S)
    hosts.join()
    going.wait_for_note("rollout/0 is back")
    going.wait_for_end()
    check(going, calm)


@pytest.mark.parametrize("preset", ["verl-colocated", "areal"])
def test_engines_of_a_lost_host_lose_no_sample(hosts: Hosts, calm: Path, preset: str) -> None:
    going = start_on_servers(hosts, preset, hosts.first, hosts.second)
    going.wait_for_step(2)
    hosts.second.lose()
    going.wait_for_note("rollout/1 is lost")
    going.wait_for_end()
    check(going, calm)


@pytest.fixture(scope="module")
def ray_hosts() -> Iterator[tuple[Hosts, Mapping[str, str]]]:
    """Two hosts, each a node of one Ray cluster, and the variables of a process that joins it."""
    with two_hosts() as made:
        yield made, start_ray(made)


def synchronous_presets() -> list[str]:
    return [name for name in preset_names() if load_schedule(name).staleness_bound == 0]


@pytest.mark.ray
@pytest.mark.parametrize("preset", [*synchronous_presets(), "areal"])
def test_a_preset_trains_over_two_nodes(ray_hosts: tuple[Hosts, Mapping[str, str]], calm: Path, preset: str) -> None:
    hosts, variables = ray_hosts
    going = start_on_ray(hosts, preset, variables)
    going.wait_for_end()
    check(going, calm)


@pytest.mark.ray
@pytest.mark.parametrize("preset", ["verl-colocated", "areal"])
def test_a_run_that_loses_a_node_continues_on_the_other(hosts: Hosts, calm: Path, preset: str) -> None:
    going = start_on_ray(hosts, preset, start_ray(hosts))
    going.wait_for_step(3)
    hosts.second.lose()
    going.wait_for_note("starts again from its newest checkpoint")
    going.wait_for_end()
    check(going, calm)


@pytest.mark.ray
@pytest.mark.parametrize("seconds", [6.0, 30.0])
def test_a_partition_of_two_nodes_loses_no_sample(hosts: Hosts, calm: Path, seconds: float) -> None:
    """After 30 s Ray counts the node as lost, so that the run starts again; shorter partitions only delay it."""
    going = start_on_ray(hosts, "verl-colocated", start_ray(hosts))
    going.wait_for_step(3)
    hosts.cut()
    time.sleep(seconds)
    hosts.join()
    going.wait_for_end()
    check(going, calm)


@pytest.mark.ray
def test_contents_are_read_on_another_machine_by_reference(ray_hosts: tuple[Hosts, Mapping[str, str]]) -> None:
    hosts, variables = ray_hosts
    log = hosts.first.folder / "contents.log"
    hosts.first.run([sys.executable, "-m", "tests.contract.remote_contents"], log, variables)
    found = dict(line.split(": ", 1) for line in log.read_text().splitlines() if ": " in line)
    remote = [place for place in "01" if found[f"camera {place} stores remotely"] == "True"]
    assert len(remote) == 1, "one of the two machines has the controller's memory"
    for reader, camera in itertools.product("01", "01"):
        assert found[f"learner {reader} reads camera {camera}"] == "[0.0, 1.0, 2.0]"
        assert found[f"learner {reader} reads what it passed on"] == str([0.0, 1.0, 2.0] * 2)
    assert (found["read here"], found["lost before the death"]) == ("0.0", "False")
    assert (found["lost with the camera"], found["a reader fails"]) == ("True", "True")


@pytest.mark.ray
def test_long_responses_train_over_two_nodes_to_the_same_bits(
    ray_hosts: tuple[Hosts, Mapping[str, str]], calm: Path
) -> None:
    """The contents of 900 tokens stay on the machines that drew them."""
    hosts, variables = ray_hosts
    long = ("steps=2", "samples_per_prompt=16", "sampling.max_new_tokens=900", "minibatches=1")
    going = start_on_ray(hosts, "verl-colocated", variables, *long, name="long")
    going.wait_for_end()
    run(calm, "long", [*SETTINGS, "schedule=verl-colocated", *long])
    rows = samples(going.root, "long")
    assert rows == samples(calm, "long") and max(int(str(row["num_tokens"])) for row in rows) == 900
    assert equal_weights(final_weights(going.root, "long"), final_weights(calm, "long"))

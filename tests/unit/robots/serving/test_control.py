"""The control loop of a robot against a real server: real-time chunking, stop-and-wait, limits, a human, errors."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import interlace
from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.robots.datasets.load import open_dataset
from interlace.robots.serving.control import ControlLoop, ControlReport, ControlSettings, Robot, Tick
from interlace.robots.serving.limits import SafetyLimits
from interlace.robots.serving.schema import ArrayField, Intervention
from interlace.robots.serving.simulated import SimulatedRobot
from interlace.robots.serving.wire import RequestError
from interlace.rollouts.envs.spec import Observation
from interlace.run.recipe.config import algorithm_of
from interlace.run.recipe.load import load_recipe
from interlace.run.replay import read_demonstrations
from tests.support.robot_server import CHUNK, DOT, HORIZON, connect, serving, settings_of

HZ = 40.0
FAMILY = "tests.support.dot_simulator:Dot"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record") / "human"


@pytest.fixture(scope="module")
def server(record: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[interlace.Server]:
    folder = tmp_path_factory.mktemp("flow")
    with serving("squashed", folder, f"policy.control_hz={HZ}", f"policy.record={record}") as started:
        yield started


@pytest.fixture
def robot() -> Iterator[SimulatedRobot]:
    with SimulatedRobot(FAMILY, DOT) as made:
        made.reset(3)
        yield made


class Watched:
    """A robot whose executed actions are kept."""

    def __init__(self, robot: Robot) -> None:
        self.robot, self.actions = robot, []

    def observe(self) -> Observation:
        return self.robot.observe()

    def act(self, action: FloatArray) -> Tick:
        self.actions.append(float(action[0]))
        return self.robot.act(action)


def run(server: interlace.Server, robot: Robot, delay_s: float, **settings: object) -> ControlReport:
    with connect(server, delay_s=delay_s) as client:
        return ControlLoop(client, robot, ControlSettings(**settings)).run(HORIZON)  # type: ignore[arg-type]


def test_real_time_chunking_does_not_wait_and_stop_and_wait_does(
    server: interlace.Server, robot: SimulatedRobot
) -> None:
    waits = run(server, robot, 0.08, mode="stop-and-wait")
    robot.reset(3)
    overlaps = run(server, robot, 0.08, mode="rtc")
    assert waits.ticks == overlaps.ticks == HORIZON
    assert waits.idle_ticks >= 2 * waits.chunks, "each chunk takes three ticks, in which nothing is executed"
    assert waits.chunks == -(-(HORIZON - waits.idle_ticks) // CHUNK)
    assert overlaps.idle_ticks < waits.idle_ticks / 2
    assert all(latency > 0.08 for latency in waits.latencies_s + overlaps.latencies_s)


def test_the_robot_enforces_limits(server: interlace.Server, robot: SimulatedRobot) -> None:
    watched = Watched(robot)
    limits = SafetyLimits(low=(-0.3,), high=(0.3,), max_change=(0.05,))
    report = run(server, watched, 0.0, limits=limits)
    assert np.abs(watched.actions).max() <= 0.3 + 1e-6 and np.abs(np.diff(watched.actions)).max() <= 0.05 + 1e-6
    assert report.limited.num_violations > 0


def test_without_a_chunk_the_watchdog_holds(server: interlace.Server, robot: SimulatedRobot) -> None:
    watched = Watched(robot)
    report = run(server, watched, 0.3, limits=SafetyLimits(watchdog_s=0.1, safe_action="zero"))
    # The chunk arrives after twelve ticks; four ticks later its actions are too old.
    assert watched.actions[:10] == [0.0] * 10 and np.count_nonzero(watched.actions) <= 5
    assert report.limited.safe_actions == report.idle_ticks >= 12


def test_an_error_of_the_server_ends_with_the_safe_action(server: interlace.Server, robot: SimulatedRobot) -> None:
    class Blind(Watched):
        def observe(self) -> Observation:
            return {"state": np.array([np.nan, 0], np.float32)}

    blind = Blind(robot)
    with pytest.raises(RequestError, match=r"state\[0\] is nan"):
        run(server, blind, 0.0)
    assert blind.actions == [], "no action is known at which the robot does not move"
    limits = SafetyLimits(safe_action="zero")
    with pytest.raises(RequestError, match=r"state\[0\] is nan"):
        run(server, blind, 0.0, limits=limits)
    assert blind.actions == [0.0]


def test_an_episode_begins_at_the_robots_position(server: interlace.Server, robot: SimulatedRobot) -> None:
    watched = Watched(robot)
    limits = SafetyLimits(max_change=(0.05,))
    with connect(server, delay_s=0.2) as client:
        loop = ControlLoop(client, watched, ControlSettings(limits=limits))
        for start in (0.4, -0.4):
            watched.actions.clear()
            robot.reset(3)
            report = loop.run(HORIZON, start=np.array([start]))
            # The first chunk arrives after eight ticks, or after fewer if a busy machine leaves ticks out.
            assert watched.actions[:2] == pytest.approx([start] * 2)
            assert np.abs(np.diff([start, *watched.actions])).max() <= 0.05 + 1e-6
            assert report.ticks == len(watched.actions) == HORIZON
        watched.actions.clear()
        robot.reset(3)
        report = loop.run(HORIZON)
        assert len(watched.actions) <= HORIZON - 2, "before the first chunk the robot gets no action"
        with pytest.raises(UserError, match=r"start = \[0.0, 0.0\]: it must be an action of 1 finite"):
            loop.run(HORIZON, start=np.zeros(2))


def test_another_robot_is_refused(server: interlace.Server, robot: SimulatedRobot) -> None:
    with connect(server) as client:
        client.schema.check_robot(robot.spec)
        for task, words in (
            ("Pendulum-v1", r"reads state of shape \[2\], and the robot gives"),
            ("CartPole-v1", r"1 numbers \(no choices\), and the robot takes 1 \(2 choices\)"),
        ):
            with SimulatedRobot("gymnasium", {"tasks": [task]}) as other, pytest.raises(UserError, match=words):
                client.schema.check_robot(other.spec)
        with pytest.raises(UserError, match="executed=9 actions, and a chunk of the policy has 8"):
            ControlLoop(client, robot, ControlSettings(executed=9))
        for settings, words in (
            (ControlSettings(mode="rct"), "mode = 'rct': it must be one of 'rtc', 'stop-and-wait'"),  # type: ignore[arg-type]
            (ControlSettings(control_hz=0), "control_hz=0: it must be above 0"),
            (ControlSettings(executed=0), "executed=0: it must be 1 or more"),
        ):
            with pytest.raises(UserError, match=words):
                ControlLoop(client, robot, settings)
        single = ArrayField(shape=(1, 1), dtype="float32")
        client.schema = client.schema.model_copy(update={"actions": single, "executed": 1})
        with pytest.raises(UserError, match="gives one action per request"):
            ControlLoop(client, robot, ControlSettings(mode="rtc"))
        ControlLoop(client, robot, ControlSettings())


def test_the_actions_of_a_human_become_demonstrations(
    server: interlace.Server, robot: SimulatedRobot, record: Path, tmp_path: Path
) -> None:
    class Stuck(Watched):
        def act(self, action: FloatArray) -> Tick:
            if len(self.actions) == 6 and len(humans) == 2:
                raise OSError("the arm is stuck")
            return super().act(action)

    watched, humans = Stuck(robot), [iter(range(HORIZON)), iter(range(HORIZON))]

    def take_over(observation: Observation) -> FloatArray | None:
        return robot.expert_action() if 4 <= next(humans[-1]) < 20 else None

    with connect(server) as client:
        loop = ControlLoop(client, watched, ControlSettings(), human=take_over)
        with pytest.raises(OSError, match="stuck"):
            loop.run(HORIZON, start=np.zeros(1))
        humans.pop()
        watched.actions.clear()
        robot.reset(3)
        report = loop.run(HORIZON, start=np.zeros(1))
    assert (report.human_ticks, report.interventions) == (16, 1) and report.success
    assert report.limited.safe_actions == report.idle_ticks, "of this episode alone"
    [episode] = open_dataset(record).episodes()
    assert episode.actions[:, 0].tolist() == pytest.approx(watched.actions[4:20])
    assert episode.shown is not None and np.array_equal(episode.shown, episode.actions), "marked as demonstrated"
    assert (len(episode), episode.instruction, episode.success) == (16, "push the puck down", True)
    assert episode.rewards is not None and episode.terminated is not None

    settings = settings_of("squashed", tmp_path)
    recipe = load_recipe("robot-sac", [*settings, f"replay.demonstrations={record}"])
    found = read_demonstrations(recipe, algorithm_of(recipe).settings)  # type: ignore[arg-type]
    assert len(found) > 0 and found.actions.shape[1] == CHUNK


def test_an_intervention_that_exceeds_a_message_is_recorded_as_one_episode(
    server: interlace.Server, record: Path
) -> None:
    ticks = np.arange(40)
    given = Intervention(
        observations={"state": np.stack([ticks, ticks], 1).astype(np.float32)},
        actions=ticks[:, None].astype(np.float32) / 40,
        prompt="push the puck down",
        rewards=-ticks.astype(np.float32),
        terminated=ticks == 39,
        success=True,
    )
    with connect(server) as client:
        before = client.record(given)
        client.schema = client.schema.model_copy(update={"max_message_bytes": 500})
        broken = replace(given, observations={"state": np.where(ticks[:, None] == 39, np.nan, 0).repeat(2, 1)})
        with pytest.raises(RequestError, match="must be finite"):
            client.record(broken)  # the last of its parts
        assert client.record(given) == before + 1
        client.schema = client.schema.model_copy(update={"max_message_bytes": 50})
        with pytest.raises(RequestError, match=r"one action .* the server takes 50. Send smaller pictures\.$"):
            client.record(given)
    whole, joined = [*open_dataset(record).episodes()][-2:]
    for name in ("actions", "shown", "rewards", "terminated"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
    np.testing.assert_array_equal(joined.observations["state"], whole.observations["state"])
    assert (joined.success, joined.instruction) == (whole.success, whole.instruction)


def test_interventions_are_refused_without_a_folder(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    settings = f"policy.record={tmp_path / 'full'}"
    with (
        pytest.raises(UserError, match="is not empty, and a data set is written whole"),
        serving("squashed", tmp_path / "cache", settings),
    ):
        pass


def test_interventions_are_refused_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with (
        pytest.raises(UserError, match="is a file, and a data set is a folder"),
        serving("squashed", tmp_path / "cache", f"policy.record={file}"),
    ):
        pass


def test_mistakes_in_the_settings_of_a_server(tmp_path: Path) -> None:
    for setting, words in (
        ("policy.control_hz=0", "policy: control_hz = 0: it must be more than 0"),
        ("policy.hz=5", "unknown key 'hz'"),
        ("policy.limits.low=[0, 0]", "low has 2 numbers, and an action of the policy has 1"),
        ("episode=single_turn", "not a robot's"),
        (
            "model.robot={state_size: 2, action_size: 2, chunk: 8, low: [], high: []}",
            "take actions of 1 numbers, and the policy gives 2",
        ),
    ):
        with pytest.raises(UserError, match=words), serving("squashed", tmp_path, setting):
            pass

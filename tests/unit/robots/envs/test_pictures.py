"""Images of simulators are upright and current, and missing rendering is reported clearly."""

import asyncio
import sys

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.robots.envs.base import VectorEnv
from interlace.robots.envs.fleet import EnvFleet
from interlace.robots.envs.load import EnvConfig, create_envs
from interlace.rollouts.envs.spec import FilmRecorder, Start


def metaworld(**settings: object) -> VectorEnv:
    pytest.importorskip("metaworld")
    return create_envs("metaworld", {"tasks": ["reach-v3"], "horizon": 20, **settings}, 2)


@pytest.mark.filterwarnings("ignore::glfw.GLFWError")
def test_metaworld_draws_or_says_what_to_install() -> None:
    try:
        envs = metaworld(image_size=48)
    except UserError as error:
        assert "libosmesa6" in str(error) and "MUJOCO_GL" in str(error)
        return
    first = envs.reset(seeds=[0, 0], task_ids=[0, 0], init_state_ids=[1, 1])["image"]
    assert first.shape == (2, 48, 48, 3) and first.std() > 10
    np.testing.assert_array_equal(first[0], first[1])
    moved = envs.chunk_step(np.ones((2, 8, 4), np.float32)).observation["image"]
    assert (moved[0] != first[0]).any()
    # The table is in the lower half, the floor's dark end in the upper one.
    picture = envs.render([0])[0]
    assert picture[96:].mean() > picture[:96].mean()
    envs.close()


@pytest.mark.filterwarnings("ignore::glfw.GLFWError")
def test_a_drawn_environment_is_not_the_one_that_was_simulated_last() -> None:
    try:
        envs = metaworld(image_size=48)
    except UserError as error:
        pytest.skip(f"nothing here draws: {error}")
    envs.reset(seeds=[0, 0], task_ids=[0, 0], init_state_ids=[1, 2])
    envs.chunk_step(np.ones((1, 8, 4), np.float32), slots=[0])
    drawn = envs.render([0])[0]
    envs.chunk_step(-np.ones((1, 8, 4), np.float32), slots=[1])
    assert (envs.render([1])[0] != drawn).any()
    np.testing.assert_array_equal(envs.render([0])[0], drawn)
    envs.close()


@pytest.mark.filterwarnings("ignore::glfw.GLFWError")
@pytest.mark.parametrize("camera", ["corner", "corner2", "corner3"])
def test_metaworld_s_pictures_are_upright_and_not_mirrored(camera: str) -> None:
    try:
        envs = metaworld(image_size=96, camera=camera)
    except UserError as error:
        pytest.skip(f"nothing here draws: {error}")
    before = envs.reset(seeds=[0, 0], task_ids=[0, 0], init_state_ids=[1, 1])["image"][0]
    env = envs._simulators.find(0, 0)._env
    number = [env.model.camera(place).name for place in range(env.model.ncam)].index(camera)
    forward, place = -env.data.cam_xmat[number].reshape(3, 3)[:, 2], env.data.cam_xpos[number]
    # A person who stands at the camera with the head up: right is forward x up.
    right = np.cross(forward, [0, 0, 1.0])
    right /= np.linalg.norm(right)
    up = np.cross(right, forward)
    focal = 48 / np.tan(np.radians(env.model.cam_fovy[number]) / 2)

    def seen(point: np.ndarray) -> np.ndarray:
        """Row and column of a point in an upright picture."""
        ray = point - place
        return np.array([48 - focal * ray @ up / (ray @ forward), 48 + focal * ray @ right / (ray @ forward)])

    # Paint the fingers: the pixels that change show where they are in the picture.
    fingers = [place for place in range(env.model.ngeom) if env.model.geom(place).bodyid[0] in _fingers(env.model)]
    env.model.geom_matid[fingers], env.model.geom_rgba[fingers] = -1, (0, 1, 0, 1)
    simulator = envs._simulators.find(0, 0)
    change = np.abs(simulator.observe()["image"].astype(int) - before).sum(-1).astype(float)
    rows, columns = np.mgrid[0:96, 0:96]
    found = np.array([(change * rows).sum(), (change * columns).sum()]) / change.sum()
    wanted = seen(np.mean([env.data.geom_xpos[place] for place in fingers], 0))
    others = {"mirrored": [wanted[0], 95 - wanted[1]], "upside down": [95 - wanted[0], wanted[1]]}
    others["rotated"] = [95 - wanted[0], 95 - wanted[1]]
    gaps = {name: float(np.linalg.norm(found - other)) for name, other in others.items()}
    assert np.linalg.norm(found - wanted) < min(3.0, *gaps.values()), (found, wanted, gaps)
    envs.close()


def _fingers(model) -> list[int]:
    return [
        place for place in range(model.nbody) if "claw" in model.body(place).name or "pad" in model.body(place).name
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there always is a screen")
def test_pictures_without_a_renderer_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"there is no screen. Install OSMesa .* or ask for no images"):
        metaworld(image_size=48)


@pytest.mark.filterwarnings("ignore::glfw.GLFWError")
def test_states_need_no_renderer() -> None:
    envs = metaworld()
    envs.reset(seeds=[0, 0], task_ids=[0, 0], init_state_ids=[1, 1])
    assert set(envs.chunk_step(np.zeros((2, 1, 4), np.float32)).observation) == {"state"}


def test_an_unknown_camera_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'corner2'"):
        metaworld(image_size=48, camera="cornr2")


def test_classic_control_is_drawn() -> None:
    pytest.importorskip("pygame")
    envs = create_envs("gymnasium", {"tasks": ["CartPole-v1"]}, 1)
    envs.reset(seeds=[0], task_ids=[0], init_state_ids=[0])
    first = envs.render()[0]
    state = envs.get_state()
    envs.chunk_step(np.ones((1, 9, 1), np.int64))
    assert first.ndim == 3 and (envs.render()[0] != first).any()
    envs.set_state(state)  # what was drawn is no part of a state
    np.testing.assert_array_equal(envs.render()[0], first)
    envs.close()


def filmed(family: str, **settings: object) -> tuple[FilmRecorder, list[np.ndarray]]:
    async def use() -> tuple[FilmRecorder, list[np.ndarray]]:
        fleet = EnvFleet(EnvConfig(family=family, settings=settings, num_envs=1))
        recorder = FilmRecorder("right/0")
        try:
            found = []
            for each in (None, recorder):
                async with fleet.episode(Start(task=0, init_state=0)) as env:
                    if each:
                        await env.film(each)
                    found += [
                        (await env.chunk_step(np.ones((2, 4), np.float32)[:, :1])).observation["state"]
                        for _ in range(2)
                    ]
            return recorder, found
        finally:
            fleet.close()

    return asyncio.run(use())


def test_an_episode_is_filmed_chunk_by_chunk_and_stays_the_same() -> None:
    recorder, found = filmed("tests.contract.envs:Walk", tasks=["right"], horizon=12, end_on_success=False)
    film = recorder.film("walked")
    assert film is not None and len(film.frames) == 3 and film.caption == "walked" and not recorder.problem
    np.testing.assert_array_equal(found[:2], found[2:])


def test_an_episode_that_cannot_be_drawn_goes_on() -> None:
    recorder, _ = filmed("tests.unit.robots.envs.blind:Blind", tasks=["right"], horizon=12)
    assert recorder.film("") is None and "cannot be drawn" in recorder.problem

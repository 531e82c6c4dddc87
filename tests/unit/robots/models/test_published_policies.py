"""The whole path of published policies, from a stored observation to the simulator's action.

Each reference below is written from the public description of the policies and simulators (OpenVLA's evaluation code,
RLinf's action conversion), without this package's functions.
"""

import io

import numpy as np
import pytest
from PIL import Image
from transformers import LlamaConfig

from interlace.core.errors import UserError
from interlace.models.action_tokens import ActionTokens, openvla_actions
from interlace.models.embodiments import find_embodiment
from interlace.models.inputs import InputEmbedding, PictureSteps, resize_with_padding
from interlace.robots.envs.libero import rotated
from interlace.robots.models.openvla_config import OpenVLAConfig

Q01, Q99 = np.array([-0.5, -2.0, -1.0, -0.1, -0.2, -0.3, 0.0]), np.array([0.5, 1.0, 1.0, 0.1, 0.3, 0.2, 1.0])
MASK = [True] * 6 + [False]
READS = InputEmbedding(placeholder=3, per_observation=1, shapes={"image": (224, 224, 3)})
TOKENS = np.array(
    [[31999, 31744, 31872, 31900, 31800, 31950, 31744], [31872, 31999, 31745, 31800, 31990, 31750, 31871]]
)
"""Two actions: the last token of the first is the highest bin (an open hand), of the second the middle (closed)."""


def policy(data_set: str, **given: object) -> ActionTokens:
    stats = {data_set: {"action": {"q01": list(Q01), "q99": list(Q99), "mask": MASK}}}
    config = LlamaConfig(vocab_size=32064, norm_stats=stats, n_action_bins=256, pad_to_multiple_of=64, **given)
    return openvla_actions(config, None, READS)


def decoded(row: np.ndarray) -> np.ndarray:
    """OpenVLA's predict_action()."""
    edges = np.linspace(-1, 1, 256)
    centers = (edges[:-1] + edges[1:]) / 2
    normalised = centers[np.clip(32000 - row - 1, 0, 254)]
    return np.where(MASK, 0.5 * (normalised + 1) * (Q99 - Q01 + 1e-8) + Q01, normalised)


def libero(action: np.ndarray) -> np.ndarray:
    gripper = np.sign(2 * action[6] - 1)  # 0 ... 1 to -1 or 1
    return np.array([*action[:6], -gripper])  # the data have 1 for open, the simulator -1


def widowx(action: np.ndarray) -> np.ndarray:
    return np.array([*action[:6] * 2.0, 1.0 if action[6] > 0.5 else -1.0])


def panda(action: np.ndarray) -> np.ndarray:
    return action


def metaworld(action: np.ndarray) -> np.ndarray:
    return np.array([action[0], action[1], action[2], action[6]])


@pytest.mark.parametrize(
    ("data_set", "given", "wanted"),
    [
        ("libero_spatial_no_noops", {}, libero),
        ("bridge_orig", {"action_scale": 2.0}, widowx),
        ("maniskill_panda", {}, panda),
        ("metaworld_mt50", {}, metaworld),
        ("my_arm", {"embodiment": "libero"}, libero),
    ],
)
def test_each_robot_carries_out_the_action_that_its_data_mean(data_set, given, wanted) -> None:
    actions = policy(data_set, **given)
    for row in TOKENS:
        expected = wanted(decoded(row))
        np.testing.assert_allclose(actions.decode(row)[0], expected, atol=1e-5)
        assert actions.simulator_size == len(expected)


def test_a_hand_opens_and_closes_in_libero() -> None:
    opened, closed = (policy("libero_object").decode(row)[0, -1] for row in TOKENS)
    assert (opened, closed) == (-1.0, 1.0), "the simulator opens the hand at -1"


@pytest.mark.parametrize("name", ["libero", "widowx", "panda", "metaworld"])
def test_a_demonstration_of_the_simulator_becomes_the_policy_s_action_and_back(name: str) -> None:
    robot = find_embodiment(name, "", scale=2.0)
    assert robot is not None
    shown = np.array([[0.1, -0.2, 0.3, 0.0, 0.1, -0.1, 1.0]], np.float32)
    shown = shown[:, [0, 1, 2, 6]] if robot.size == 4 else shown
    np.testing.assert_allclose(robot.to_simulator(robot.to_policy(shown)), shown, atol=1e-6)


def test_an_unknown_robot_is_named() -> None:
    with pytest.raises(UserError, match=r"embodiment 'libro' .* Did you mean 'libero'"):
        policy("my_arm", embodiment="libro")


def picture(height: int = 256, width: int = 256) -> np.ndarray:
    """A stored observation: smooth shapes with sharp edges, different on each side."""
    rows, columns = np.mgrid[0:height, 0:width]
    found = np.stack([rows * 255 // height, columns * 255 // width, (rows // 16 + columns // 24) % 2 * 200], -1)
    found[20:60, 30:200] = (250, 10, 40)
    return found.astype(np.uint8)


def lanczos_by_pixels(values: np.ndarray, side: int) -> np.ndarray:
    """TensorFlow's lanczos3 with antialias along the first axis, one output pixel after another."""
    length = len(values)
    scale = length / side
    found = np.zeros((side, *values.shape[1:]))
    for target in range(side):
        center, total = (target + 0.5) * scale, 0.0
        for source in range(length):
            x = abs(source + 0.5 - center) / max(scale, 1.0)
            weight = (
                1.0 if x == 0 else 3 * np.sin(np.pi * x) * np.sin(np.pi * x / 3) / (np.pi * x) ** 2 if x < 3 else 0.0
            )
            found[target] += weight * values[source]
            total += weight
        found[target] /= total
    return found


def openvla_reference(raw: np.ndarray, side: int, crop: bool) -> np.ndarray:
    """OpenVLA-OFT's evaluation on LIBERO: rotate, JPEG, lanczos3, round; crop of area 0.9, bilinear, to uint8."""
    file = io.BytesIO()
    Image.fromarray(raw[::-1, ::-1]).save(file, format="JPEG", quality=95)
    image = np.array(Image.open(file)).astype(np.float64)
    image = lanczos_by_pixels(image, side)
    image = np.clip(np.round(lanczos_by_pixels(image.swapaxes(0, 1), side).swapaxes(0, 1)), 0, 255)
    if not crop:
        return image.astype(np.uint8)
    share, found = np.sqrt(0.9), np.zeros_like(image)
    first = (1 - share) / 2 * (side - 1)
    for row in range(side):
        for column in range(side):
            y, x = first + row * share, first + column * share
            top, left = int(y), int(x)
            down, right = min(top + 1, side - 1), min(left + 1, side - 1)
            above = image[top, left] * (1 - (x - left)) + image[top, right] * (x - left)
            below = image[down, left] * (1 - (x - left)) + image[down, right] * (x - left)
            found[row, column] = above * (1 - (y - top)) + below * (y - top)
    return np.clip(np.floor(found / 255 * 255.5), 0, 255).astype(np.uint8)


def steps(data_set: str, **given: object) -> PictureSteps:
    stats = {data_set: {"action": {"q01": list(Q01), "q99": list(Q99)}}}
    return OpenVLAConfig(norm_stats=stats, image_sizes=[56, 56], **given).picture_steps


@pytest.mark.parametrize(("data_set", "crop"), [("libero_10_no_noops", True), ("bridge_orig", False)])
def test_pictures_are_prepared_as_in_the_policy_s_evaluation(data_set: str, crop: bool) -> None:
    raw = picture()
    wanted = openvla_reference(raw, 56, crop)
    found = steps(data_set).prepare(rotated(raw))
    gap = np.abs(found.astype(int) - wanted)
    assert gap.max() <= 1 and gap.mean() < 0.01


def test_a_folder_s_origin_decides_the_preparation() -> None:
    assert steps("libero_goal", picture_origin="processor") == PictureSteps(side=56, resize="bicubic")
    assert steps("my_arm") == PictureSteps(side=56, resize="bicubic")
    assert steps("libero_goal", center_crop=False).crop_area == 1.0
    found = steps("my_arm").prepare(picture(100, 120))
    wanted = np.asarray(Image.fromarray(picture(100, 120)).resize((56, 56), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(found, wanted)


def test_pictures_of_a_wide_camera_keep_their_proportions() -> None:
    raw = np.full((60, 120, 3), 200, np.uint8)
    left_top, center = (resize_with_padding(raw, 80, centered=centered) for centered in (False, True))
    assert (left_top[:40] == 0).all() and (left_top[40:] == 200).all(), "SmolVLA pads at the top and the left"
    assert (center[:20] == 0).all() and (center[20:60] == 200).all() and (center[60:] == 0).all(), "pi0 on both sides"

"""Action tokens in OpenVLA's layout equal OpenVLA's arithmetic."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import LlamaConfig

from interlace.core.errors import UserError
from interlace.models.action_tokens import openvla_actions
from interlace.models.inputs import InputEmbedding

READS = InputEmbedding(placeholder=3, per_observation=1, shapes={"image": (8, 8, 3)})
STATS = {
    "q01": [-0.5, -2.0, 0.0], "q99": [0.5, 1.0, 1.0], "mask": [True, True, False],
}  # fmt: skip


def config(**changed) -> LlamaConfig:
    given = {"norm_stats": {"kitchen": {"action": STATS}}, "n_action_bins": 256, "pad_to_multiple_of": 64}
    return LlamaConfig(vocab_size=32064, **{**given, **changed})


def openvla_decode(token_ids: np.ndarray) -> np.ndarray:
    """As predict_action() of its published code computes."""
    bins = np.linspace(-1, 1, 256)
    centers = (bins[:-1] + bins[1:]) / 2.0
    chosen = np.clip(32000 - token_ids - 1, a_min=0, a_max=centers.shape[0] - 1)
    normalized = centers[chosen]
    low, high = np.array(STATS["q01"]), np.array(STATS["q99"])
    return np.where(STATS["mask"], 0.5 * (normalized + 1) * (high - low + 1e-8) + low, normalized)


def test_tokens_mean_the_same_actions():
    actions = openvla_actions(config(), None, READS)
    tokens = np.array([[31999, 31999, 31999], [31744, 31745, 31900], [31872, 31800, 31950]])
    for row in tokens:
        np.testing.assert_allclose(actions.decode(row)[0], openvla_decode(row), atol=1e-5)
        assert actions.encode(actions.decode(row))[1:].tolist() == np.clip(row, 31745, None)[1:].tolist()


def test_a_data_set_is_named_where_there_are_several():
    both = {"kitchen": {"action": STATS}, "fractal": {"action": {**STATS, "q99": [1.0, 1.0, 1.0]}}}
    with pytest.raises(UserError, match=r"kitchen, fractal. Name one as unnorm_key"):
        openvla_actions(config(norm_stats=both), None, READS)
    assert openvla_actions(config(norm_stats=both), "fractal", READS).high[0] == 1.0


def test_bounds_have_the_size_and_the_order_of_the_policys_numbers():
    stats = {"q01": [-0.5] * 6 + [0.0], "q99": [0.5] * 6 + [1.0]}
    for embodiment, size in (("metaworld", 4), ("libero", 7)):  # LIBERO's gripper is inverted
        given = config(norm_stats={"kitchen": {"action": stats}}, embodiment=embodiment, num_actions_chunk=2)
        actions = openvla_actions(given, None, READS)
        low, high = actions.scale_bounds(np.full(size, -1, np.float32), np.full(size, 1, np.float32))
        assert low.shape == high.shape == (14,) and (low <= high).all()
        np.testing.assert_allclose((low[0], high[0]), (-2, 2), rtol=1e-6)
    np.testing.assert_allclose((low[6], high[13]), (-1, 1), rtol=1e-6)
    one = np.ones(1, np.float32)
    empty = replace(actions, low=one, high=one, embodiment=None)
    assert np.isfinite(empty.scale_bounds(-one, one)).all()

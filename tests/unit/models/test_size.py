"""What a model needs is known before its weights are read."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from interlace.core.types import Prompt, Sample, SampleKey
from interlace.engines.train import OptimizerConfig, TrainConfig, TrainEngine, sft_loss
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.models.size import model_size

TINY = ModelConfig(path="tiny:micro")


@contextmanager
def kept_for_the_backward(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Bytes by storage, the model's own weights left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize("recomputed", [False, True])
def test_activations_are_about_what_a_forward_keeps(recomputed: bool) -> None:
    size, model = model_size(TINY), load_model(TINY).model
    engine = TrainEngine(
        model, loss=sft_loss, optimizer=OptimizerConfig(), config=TrainConfig(gradient_checkpointing=recomputed)
    )
    ids = np.arange(1, 33, dtype=np.int32)
    prompt = Prompt(uid="0", token_ids=ids[:1], text="", answer="")
    samples = [Sample(key=SampleKey(0, i), prompt=prompt, token_ids=ids) for i in range(8)]
    with kept_for_the_backward(model) as kept:
        outputs = engine.packed.outputs(engine._collate(samples, masks=[None] * len(samples)))
    assert outputs.nbytes == 8 * 32 * size.logit_bytes_per_token
    expected = size.activation_bytes(8 * 32, recomputed=recomputed)
    if recomputed:  # one layer's are made anew in the backward
        expected -= 8 * 32 * size.layer_bytes_per_token
    assert sum(kept.values()) == pytest.approx(expected, rel=0.15)

"""A version folder has the form in which transformers saves a model."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from interlace.core.errors import InterlaceError
from interlace.engines.train import Adapter, LoraConfig
from interlace.engines.train.export import list_named_weights
from interlace.weights.config import WeightsConfig
from interlace.weights.reader import WeightReader
from interlace.weights.ref import Route
from interlace.weights.saved import SavedWeights, trace_saved_form
from interlace.weights.writer import WeightWriter
from tests.unit.engines.train.models import tiny_model
from tests.unit.weights.test_ends import assert_equal, publish, taken


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss", "gpt2"])
def test_a_version_folder_has_the_names_that_other_programs_know(tmp_path: Path, kind: str) -> None:
    """mixtral and qwen3_moe hold experts stacked and gates beside ups; they are saved one by one."""
    model = tiny_model(kind)
    given = list_named_weights(model)
    config = WeightsConfig(transport="folder", folder=str(tmp_path / "versions"))
    writer = WeightWriter(Route(transport="folder", config=config), form=partial(trace_saved_form, model))
    ref, reader = publish(writer, 1, given), WeightReader()
    assert_equal(taken(reader, ref), given)
    (version,) = (tmp_path / "versions").iterdir()
    loaded = AutoModelForCausalLM.from_pretrained(version).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in given.items())
    model.save_pretrained(tmp_path / "saved")
    assert SavedWeights(version).shapes == SavedWeights(tmp_path / "saved").shapes


def test_a_version_folder_of_a_model_with_an_adapter_has_the_merged_layers(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_model("llama")
    given = list_named_weights(model)
    Adapter(model, LoraConfig(rank=2, target_modules=("q_proj",)), seed=0)
    config = WeightsConfig(transport="folder", folder=str(tmp_path))
    writer = WeightWriter(Route(transport="folder", config=config), form=partial(trace_saved_form, model))
    assert_equal(taken(WeightReader(), publish(writer, 1, given)), given)


def test_a_tensor_without_a_place_in_the_saved_form_is_refused(tmp_path: Path) -> None:
    """An engine would have read memory without content."""
    model = tiny_model("gpt2")
    form = trace_saved_form(model)
    cut = replace(form, landings=[each for each in form.landings if "ln_f.bias" not in each.target])
    config = WeightsConfig(transport="folder", folder=str(tmp_path))
    writer = WeightWriter(Route(transport="folder", config=config), form=lambda: cut)
    with pytest.raises(InterlaceError, match=r"no place for all of transformer\.ln_f\.bias"):
        publish(writer, 1, list_named_weights(model))


def test_a_model_whose_saver_leaves_out_weights_is_written_with_its_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(_: object, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"saved.{name}": tensor for name, tensor in given.items() if "ln_f.bias" not in name}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", save)
    model = tiny_model("gpt2")
    given = list_named_weights(model)
    config = WeightsConfig(transport="folder", folder=str(tmp_path))
    writer = WeightWriter(Route(transport="folder", config=config), form=partial(trace_saved_form, model))
    assert_equal(taken(WeightReader(), publish(writer, 1, given)), given)

"""A mistake in a configuration is reported with the key that was probably meant."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.types import SamplingParams


class Optimizer(Config):
    learning_rate: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)


class Bounds(Config):
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def _ordered(self) -> "Bounds":
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self


class Recipe(Config):
    steps: int = 10
    bounds: Bounds = Bounds()
    optimizer: Optimizer = Optimizer()
    reference: Optimizer | None = None
    granule: Literal["step", "group"] | Annotated[int, Field(ge=1)] | Bounds = "step"
    name: str


@pytest.mark.parametrize(
    ("data", "sentences"),
    [
        ({"name": "x", "step": 3}, ["unknown key 'step'", "Did you mean 'steps'?"]),
        ({"name": "x", "optimizer": {"lerning_rate": 1}}, ["unknown key 'optimizer.lerning_rate'", "'learning_rate'"]),
        ({"name": "x", "reference": {"beta": 1}}, ["'reference.beta'", "Did you mean 'betas'?"]),
        ({}, ["missing key 'name'"]),
        ({"name": "x", "steps": "many"}, ["steps = 'many'", "a whole number"]),
        ({"name": "x", "optimizer": {"learning_rate": 0}}, ["optimizer.learning_rate = 0: it must be more than 0."]),
        (
            {"name": "x", "granule": 0},
            ["granule = 0: it must be 'step' or 'group'. Or: it must be 1 or more."],
        ),
        ({"name": "x", "granule": "grup"}, ["granule = 'grup': it must be 'step' or 'group' (did you mean 'group'?)"]),
        ({"name": "x", "optimizer": {"betas": 0.9}}, ["optimizer.betas = 0.9: it must be a list in brackets"]),
        (
            {"name": "x", "optimizer": "adamw"},
            ["optimizer = 'adamw': it has settings, so write optimizer.learning_rate="],
        ),
        ({"name": "x", "granule": {"lo": 1}}, ["unknown key 'granule.lo'. Did you mean 'low'?"]),
        ({"name": "x", "str": 1}, ["unknown key 'str'"]),
        ({"steps": "many", "optimzer": {}}, ["steps = 'many'", "missing key 'name'", "Did you mean 'optimizer'?"]),
    ],
)
def test_every_mistake_is_a_sentence_with_its_key(data: dict[str, object], sentences: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        Recipe.parse(data, where="recipe.yaml")
    for sentence in sentences:
        assert sentence in str(raised.value)
    assert all(line.startswith("recipe.yaml: ") for line in str(raised.value).splitlines())


def test_a_key_like_none_lists_what_there_is() -> None:
    with pytest.raises(UserError, match="Known: bounds, granule, name, optimizer, reference, steps") as raised:
        Recipe.parse({"name": "x", "zzzzzz": 1})
    assert "Did you mean" not in str(raised.value)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_is_finite(value: float) -> None:
    with pytest.raises(UserError, match=r"optimizer.learning_rate = .* finite number"):
        Recipe.parse({"name": "x", "optimizer": {"learning_rate": value}})


def test_a_section_that_contradicts_itself_is_not_repeated_whole() -> None:
    with pytest.raises(UserError) as raised:
        Recipe.parse({"name": "x", "bounds": {"low": 2, "high": 1}}, where="recipe.yaml")
    assert str(raised.value) == "recipe.yaml: bounds: low (2) is above high (1)."


def test_a_config_is_frozen_all_the_way_down() -> None:
    recipe = Recipe(name="x")
    with pytest.raises(ValidationError, match="frozen"):
        recipe.steps = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        recipe.optimizer.learning_rate = 1.0  # type: ignore[misc]


def test_parsing_what_was_dumped_gives_it_back() -> None:
    recipe = Recipe(name="x", reference=Optimizer(learning_rate=0.5))
    assert Recipe.parse(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"max_new_tokens": 0}, {"min_p": 2}]
)
def test_sampling_parameters_out_of_range_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        SamplingParams.parse(bad)

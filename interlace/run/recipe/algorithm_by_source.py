"""The algorithm of a mixture whose sources name algorithms, and the settings that recipe and sources share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from interlace.algorithms.base import Advantages, Algorithm, AlgorithmConfig, Needs, advantages_of, check_shapes
from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.training import LossInputs, LossOutputs, check_outputs

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.core.types import FloatArray, Sample, SampleGroup
    from interlace.observe.headline import Headline

SHARED: Mapping[str, str] = {
    "critic": "a critic",
    "process_reward": "a process reward model",
    "greedy_baseline": "a greedy response to each prompt",
}
"""Needs that apply to the prompts of all sources or to none."""
OF_STEP = tuple(name for name in AlgorithmConfig.model_fields if not name.startswith("aggregation"))
"""Settings that apply to a step or an update, whose rows are of all sources."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceAlgorithm:
    """The algorithm of a source of a mixture."""

    source: str
    """Name of the source; empty text for the algorithm of all prompts."""
    name: str
    algorithm: Algorithm


class AlgorithmBySource(Algorithm):
    """Filters, advantages and loss of each group by the algorithm of its source.

    The rows of all sources are in one update: the loss of each row is its own algorithm's, and one aggregation, with
    one normaliser, reduces them. An algorithm gets only the columns that it needs.
    """

    def __init__(self, default: Algorithm, sources: Sequence[SourceAlgorithm]) -> None:
        """default: the recipe's algorithm, which gives the settings of the update. sources: all sources."""
        super().__init__(default.settings)
        self._default = default
        self._by_source = {each.source: each.algorithm for each in sources}
        self._used = list({id(each.algorithm): each.algorithm for each in sources}.values())

    @property
    def needs(self) -> Needs:
        """Returns the needs of any of the algorithms: a model that one needs computes the samples of all sources."""
        found = [algorithm.needs for algorithm in self._used]
        either = {name: any(getattr(needs, name) for needs in found) for name in _FLAGS}
        return replace(found[0], **either, teacher_top=max(needs.teacher_top for needs in found))

    @property
    def is_group_relative(self) -> bool:
        """Returns True if one of the algorithms compares samples: a group of any source then needs two survivors."""
        return any(algorithm.is_group_relative for algorithm in self._used)

    @property
    def headline(self) -> Headline:
        return self._default.headline

    @property
    def selects(self) -> bool:
        return any(algorithm.selects for algorithm in self._used)

    def keeps(self, group: SampleGroup) -> bool:
        return self._find(group.samples[0].prompt.source).keeps(group)

    def advantages(self, group: SampleGroup) -> Advantages:
        return self._find(group.samples[0].prompt.source).advantages(group)

    def batch_advantages(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        """Computes the advantages of each algorithm's samples from these samples alone."""
        found = advantages_of(samples)
        for algorithm, places in self._places([sample.prompt.source for sample in samples]):
            if algorithm.needs.batch_statistics:
                own = [samples[place] for place in places]
                whole = algorithm.batch_advantages(own)
                check_shapes("batch_advantages", "advantages", whole, own)
                for place, advantages in zip(places, whole, strict=True):
                    found[place] = advantages
        return found

    def loss(self, inputs: LossInputs) -> LossOutputs:
        """Computes the loss of each token by the algorithm of its sample's source.

        Metrics of an algorithm are means over its own tokens and samples.
        """
        parts = self._places(inputs.sources_N or [""] * inputs.num_samples)
        if len(parts) == 1:
            [(algorithm, _)] = parts
            return algorithm.loss(_hide_columns(inputs, algorithm.needs))
        loss_T = inputs.logprobs_T.new_zeros(inputs.logprobs_T.shape)
        metrics: list[Mapping[str, Tensor]] = []
        for algorithm, samples in parts:
            own, places_T = _select_samples(_hide_columns(inputs, algorithm.needs), samples)
            outputs = check_outputs(algorithm.loss(own), own)
            loss_T = loss_T.index_copy(0, places_T, outputs.loss_T)
            metrics += [outputs.metrics_T, outputs.sample_metrics_N]
        return LossOutputs(loss_T=loss_T, metrics_T={}, partial_metrics=metrics)

    def _find(self, source: str) -> Algorithm:
        return self._by_source.get(source, self._default)

    def _places(self, sources: Sequence[str]) -> list[tuple[Algorithm, list[int]]]:
        """Returns the algorithms of samples, and the places of each algorithm's samples. sources: of each sample."""
        found: dict[int, tuple[Algorithm, list[int]]] = {}
        for place, source in enumerate(sources):
            algorithm = self._find(source)
            found.setdefault(id(algorithm), (algorithm, []))[1].append(place)
        return list(found.values())


_FLAGS = ("reference", "teacher", "reward", "proximal_logprobs", "batch_statistics")
"""Needs of which each algorithm has its own."""


def _hide_columns(inputs: LossInputs, needs: Needs) -> LossInputs:
    """Returns the inputs with the columns that a run of an algorithm with these needs alone would have."""
    return replace(
        inputs,
        ref_logprobs_T=inputs.ref_logprobs_T if needs.reference else None,
        proximal_logprobs_T=inputs.proximal_logprobs_T if needs.proximal_logprobs else inputs.behaviour_logprobs_T,
        teacher_top_TK=inputs.teacher_top_TK if needs.teacher_top else None,
        policy_top_TK=inputs.policy_top_TK if needs.teacher_top else None,
    )


def _select_samples(inputs: LossInputs, samples: Sequence[int]) -> tuple[LossInputs, Tensor]:
    """Returns the inputs of some samples of a micro-batch, and the places of their tokens in it.

    samples: ascending numbers.
    """
    number_of = {sample: number for number, sample in enumerate(samples)}
    numbers_N = inputs.sample_T.new_tensor([number_of.get(sample, -1) for sample in range(inputs.num_samples)])
    numbers_T = numbers_N.index_select(0, inputs.sample_T)
    places_T = (numbers_T >= 0).nonzero()[:, 0]
    tensors = {
        field.name: getattr(inputs, field.name) for field in fields(inputs) if field.name.endswith(("_T", "_TK"))
    }
    selected = {name: None if values is None else values.index_select(0, places_T) for name, values in tensors.items()}
    own = replace(
        inputs,
        **selected,  # type: ignore[arg-type]  # a value is None only if the field may be
        num_samples=len(samples),
        sources_N=tuple(inputs.sources_N[sample] for sample in samples),
    )
    return replace(own, sample_T=numbers_T.index_select(0, places_T)), places_T


def check_algorithms(default: tuple[str, Algorithm], sources: Sequence[SourceAlgorithm]) -> None:
    """Raises UserError if the algorithms of sources cannot train together.

    default: name and algorithm of the recipe. sources: all sources, or the algorithm of all prompts alone.
    """
    for each in sources:
        if each.source:
            _check_kind(each, default)
            _check_settings(each, default)
    _check_teachers(sources)


def _check_kind(own: SourceAlgorithm, default: tuple[str, Algorithm]) -> None:
    """Raises UserError if a source's algorithm and the recipe's train on different rows or need different roles."""
    place = f"task: algorithm {own.name!r} of the source {own.source!r}"
    recipes_name, recipes = default
    for of, each in ((place, own.algorithm), (f"algorithm {recipes_name!r}", recipes)):
        if each.rows is not None or not each.needs.on_policy or each.needs.transitions:
            how = "on given rows" if each.rows is not None else "from a replay"
            raise UserError(
                f"{of} trains {how}, and the algorithms of a mixture's sources train on the samples of each step. "
                "Take another, such as grpo, or remove `algorithm` from the sources."
            )
    for need, what in SHARED.items():
        if getattr(own.algorithm.needs, need) != getattr(recipes.needs, need):
            is_own = getattr(own.algorithm.needs, need)
            has, lacks = (own.name, recipes_name) if is_own else (recipes_name, own.name)
            raise UserError(
                f"{place} cannot train with the recipe's algorithm {recipes_name!r}: {has!r} needs {what} for all "
                f"samples of a step, and {lacks!r} needs none. Take two algorithms with the same needs."
            )


def _check_settings(own: SourceAlgorithm, default: tuple[str, Algorithm]) -> None:
    """Raises UserError for a setting of the update or the step that differs from the recipe's."""
    recipes_name, recipes = default
    for setting in AlgorithmConfig.model_fields:
        value, wanted = getattr(own.algorithm.settings, setting), getattr(recipes.settings, setting)
        if value != wanted:
            raise UserError(
                f"task: algorithm {own.name!r} of the source {own.source!r} has {setting}={value}, and the recipe's "
                f"algorithm {recipes_name!r} has {setting}={wanted}. An update trains rows of all sources, so "
                f"{setting} is one for all: set it to the same value in both."
            )


def _check_teachers(sources: Sequence[SourceAlgorithm]) -> None:
    """Raises UserError if the algorithms of a mixture read different references."""
    needs = {each.source: each.algorithm.needs for each in sources}
    taught = next((source for source, each in needs.items() if each.teacher), None)
    if taught is None:
        return
    for source, each in needs.items():
        if each.reference and not each.teacher:
            raise UserError(
                f"task: the source {taught!r} learns from a teacher, and the algorithm of {source!r} has a KL to the "
                "reference. A run has one reference, which is the teacher here: set kl_coefficient and "
                f"kl_reward_coefficient of {source!r} to 0."
            )
    tops = sorted({each.teacher_top for each in needs.values() if each.teacher_top})
    if len(tops) > 1:
        raise UserError(
            f"task: the algorithms of the sources have teacher_top_k={' and '.join(map(str, tops))}. The teacher "
            "computes one number for all: set it to the same value."
        )


def share_reward(data: Any) -> Any:
    """Takes the first source's reward as the recipe's if the recipe has none and all sources of a mixture have one."""
    parts = _list_parts(data)
    if not parts or data.get("reward") is not None or any(part.get("reward") is None for part in parts):
        return data
    return {**data, "reward": parts[0]["reward"]}


def complete_algorithms(data: Any) -> Any:
    """Adds the recipe's settings to the algorithms of sources: all if `name` is left out, else the ones of OF_STEP.

    If the recipe has no algorithm and all sources name one, the first is the recipe's.
    """
    parts = _list_parts(data)
    if not any(part.get("algorithm") is not None for part in parts):
        return data
    if data.get("algorithm") is None and all("name" in _to_mapping(part.get("algorithm") or {}) for part in parts):
        data = {**data, "algorithm": parts[0]["algorithm"]}
    recipes = _to_mapping(data.get("algorithm") or {})
    of_step = {name: recipes[name] for name in OF_STEP if name in recipes}

    def complete(part: Mapping[str, object]) -> Mapping[str, object]:
        if part.get("algorithm") is None:
            return part
        given = _to_mapping(part["algorithm"])
        return {**part, "algorithm": {**(of_step if "name" in given else recipes), **given}}

    task, completed = data["task"], [complete(part) for part in parts]
    return {**data, "task": {**task, "mixture": completed} if isinstance(task, Mapping) else completed}


def _list_parts(data: Any) -> Sequence[Mapping[str, object]]:
    """Returns the sources of the mixture; none if the settings are no mapping or a source is no mapping."""
    task = data.get("task") if isinstance(data, Mapping) else None
    parts = task.get("mixture") if isinstance(task, Mapping) else task
    found = list(parts) if isinstance(parts, list | tuple) else []
    return found if all(isinstance(part, Mapping) for part in found) else []


def _to_mapping(algorithm: object) -> dict[str, object]:
    """Returns the settings of an algorithm. Raises ValueError for a value of another type."""
    if isinstance(algorithm, Config):
        return algorithm.model_dump(mode="json")
    if isinstance(algorithm, Mapping):
        return dict(algorithm)
    if isinstance(algorithm, str):
        return {"name": algorithm}
    raise ValueError(f"algorithm = {algorithm!r} of a source: write a name, or a mapping with the settings to change")

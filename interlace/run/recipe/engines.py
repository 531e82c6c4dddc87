"""Checks, before a run starts, that the rollout engine of a recipe supports the recipe's settings."""

from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.engines.rollout.kinds import LOW_TEMPERATURE, EngineKind, Feature, create_kind
from interlace.engines.rollout.kinds.address import AddressKind
from interlace.engines.train.config import training_temperature
from interlace.run.recipe.config import Recipe, algorithm_of, list_algorithms
from interlace.run.recipe.layout import num_spanned, num_used
from interlace.schedule.placement import Device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_engine(
    recipe: Recipe, devices: tuple[Device, ...], model: "PreTrainedModel", *, is_planned: bool = False
) -> None:
    """Raises UserError for an engine that is not installed, that lacks a feature needed by the settings, or whose
    instances have another number of devices than the engine computes on.

    is_planned: the devices are of another machine, so that this one need not have the engine's package.
    """
    kind = create_kind(recipe.rollout)
    if kind.num_addresses is None:
        _check_span(recipe, "rollout", devices)
    if algorithm_of(recipe).needs.reference:
        _check_span(recipe, "reference", devices)
    for pool in {device.pool for instance in _find_instances(recipe, "rollout", devices) for device in instance}:
        if not is_planned and (absence := kind.absence(pool)):
            raise UserError(f"rollout.engine = {recipe.rollout.engine!r} is not run here: {absence}")
        kind.check_model(model, pool)
    check_features(recipe, devices)
    _check_correction(recipe)
    _check_adapter(recipe, kind)
    _check_scoring(recipe, model)
    if isinstance(kind, AddressKind):
        _check_addresses(recipe, kind, model)


def _check_scoring(recipe: Recipe, model: "PreTrainedModel") -> None:
    """Raises UserError if the reference's engine is not a service, or scores another distribution than the trained."""
    service = recipe.reference.service
    if service is None:
        return
    kind = create_kind(service)
    if not kind.is_service:
        raise UserError(
            f"reference.service = {service.engine!r} is not a service. Take address, interlace, vllm or sglang, or "
            "remove reference.service."
        )
    if not algorithm_of(recipe).needs.reference:
        raise UserError(
            f"reference.service is set, but algorithm {recipe.algorithm.name!r} with these settings asks for no "
            "reference. Set algorithm.kl_coefficient above 0, or remove reference.service."
        )
    if training_temperature(recipe.sampling) != 1.0:
        raise UserError(
            f"reference.service gives log-probs at temperature 1, and sampling.temperature is "
            f"{recipe.sampling.temperature:g}. Set it to 1, or remove reference.service."
        )
    if absence := kind.absence("cpu" if kind.num_addresses is not None else recipe.cluster.devices.split(":")[0]):
        raise UserError(f"reference.service = {service.engine!r} is not run here: {absence}")
    if isinstance(kind, AddressKind):
        engines = create_kind(recipe.rollout)
        if shared := {*kind.urls} & {*(engines.urls if isinstance(engines, AddressKind) else ())}:
            raise UserError(
                f"reference.service: {min(shared)} is also in rollout.urls, whose servers load every trained version, "
                "and the reference stays as it was at the start. Name another server."
            )
        _check_addresses(recipe, kind, model, is_fixed=True)


def _check_addresses(recipe: Recipe, kind: AddressKind, model: "PreTrainedModel", *, is_fixed: bool = False) -> None:
    """Raises UserError, with the address, if a server does not answer or serves another model.

    is_fixed: whether the servers must serve the weights that they started with.
    """
    from interlace.engines.rollout.services.check import WantedModel, check_servers
    from interlace.engines.rollout.services.protocol import Address

    urls = kind.check_urls()
    wanted = WantedModel(
        vocab_size=model.config.get_text_config().vocab_size,
        num_tokens=recipe.sampling.max_new_tokens,
        dtype=recipe.model.dtype,
        corrects_dtype=_find_uncorrected(recipe) is None,
        temperature=recipe.sampling.temperature,
        is_fixed=is_fixed,
    )
    check_servers([Address(url=url, key=kind.key) for url in urls], kind.config.dialect, wanted)


def _check_adapter(recipe: Recipe, kind: EngineKind) -> None:
    """Raises UserError for weights.adapter=alone without an adapter, or with an engine that cannot add one."""
    if recipe.weights.adapter == "merged":
        return
    if recipe.actor.lora is None:
        raise UserError("weights.adapter=alone, but no adapter is trained: set actor.lora, or weights.adapter=merged.")
    if not kind.takes_adapters or kind.num_ranks > 1:
        raise UserError(
            f"weights.adapter=alone, and an engine {recipe.rollout.engine!r} of {kind.num_ranks} ranks does not add "
            "adapters to its weights: set weights.adapter=merged, or take rollout.engine=native on one rank."
        )


def _check_correction(recipe: Recipe) -> None:
    """Raises UserError for weights in eight bits without an off-policy correction.

    The engine then samples from a policy that differs from the trained one.
    """
    rounded = {"rollout.weights": "model"} if getattr(recipe.rollout, "weights", "model") == "int8" else {}
    rounded |= {"weights.codec": "raw"} if recipe.weights.codec == "int8" else {}
    uncorrected = _find_uncorrected(recipe)
    if rounded and uncorrected is not None:
        setting, exact = next(iter(rounded.items()))
        raise UserError(
            f"{setting}=int8 samples from another distribution than is trained, and algorithm "
            f"{uncorrected!r} does not correct for it. Set algorithm.off_policy.proximal=recomputed and "
            "algorithm.off_policy.correction=truncate (or mask, which does not need recomputed), or "
            f"{setting}={exact}."
        )


def _find_uncorrected(recipe: Recipe) -> str | None:
    """Returns the name of an algorithm of the recipe without an off-policy correction; None if all have one."""
    for each in list_algorithms(recipe):
        off_policy = getattr(each.algorithm.settings, "off_policy", None)
        if off_policy is None or off_policy.correction == "none":
            return each.name
    return None


def check_invariance(recipe: Recipe) -> None:
    """Raises UserError if a sample of the recipe's engine depends on the other samples of its batch."""
    kind = create_kind(recipe.rollout)
    if reason := kind.lacks.get("invariance"):
        raise UserError(
            f"rollout.engine = {recipe.rollout.engine!r} gives a sample other bits in another batch ({reason}), so two "
            "schedules do not give the same samples. Compare schedules with rollout.engine=native."
        )


def spanning_roles(recipe: Recipe, devices: tuple[Device, ...]) -> tuple[str, ...]:
    """Returns the roles with an instance on several devices. On several GPUs, no engine was run here."""
    return tuple(
        role
        for role in ("rollout", "reference")
        if any(len(instance) > 1 for instance in _find_instances(recipe, role, devices))
    )


def _find_instances(recipe: Recipe, role: str, devices: tuple[Device, ...]) -> tuple[tuple[Device, ...], ...]:
    return recipe.schedule.resolved.instances(role, devices)


def _check_span(recipe: Recipe, role: str, devices: tuple[Device, ...]) -> None:
    """Raises UserError if an instance has devices that it does not compute on."""
    for instance in _find_instances(recipe, role, devices):
        pool = instance[0].pool
        used = num_used(recipe, role, instance)
        if used != len(instance):
            what = f"engine {recipe.rollout.engine!r} computes" if role == "rollout" else "its log-probs are computed"
            by_threads = pool == "cpu" and num_spanned(recipe, role, pool) is None
            how = " (cluster.threads_per_worker)" if by_threads else ""
            raise UserError(
                f"schedule.placement.{role}: an instance has {len(instance)} devices (devices_per_instance), and {what}"
                f" on {used}{how}. Set devices_per_instance to {used}, or take an engine that spans several, such as"
                " vllm with rollout.tensor_parallel_size."
            )


def check_features(recipe: Recipe, devices: tuple[Device, ...]) -> None:
    """Raises UserError if the engine lacks a feature that the sampling or the schedule needs."""
    kind, schedule = create_kind(recipe.rollout), recipe.schedule.resolved
    wanted: dict[Feature, str] = {}
    if recipe.sampling.raw_logprobs:
        wanted["raw_logprobs"] = "sampling.raw_logprobs=true asks for the model's own log-probs. Leave it off"
    sampling = recipe.sampling
    if sampling.top_p < 1 or sampling.top_k or sampling.min_p:
        wanted["truncation"] = "sampling cuts tokens off. Leave top_p, top_k and min_p at their defaults"
    if 0 < sampling.temperature < LOW_TEMPERATURE:
        wanted["low_temperature"] = (
            f"sampling.temperature is {sampling.temperature:g}. Set it to {LOW_TEMPERATURE:g} or more, or to 0"
        )
    if schedule.moves_kv_cache(devices):
        wanted["kv_offload"] = (
            "schedule.kv_on_switch=offload moves the KV cache of running sequences to the host while another role "
            "computes. Set schedule.kv_on_switch=recompute (with on_update other than keep)"
        )
    if schedule.follows_kv_use:
        wanted["kv_use"] = (
            "schedule.concurrency=adaptive, or episodes without kv_tokens, follows how full the KV cache is. Give a "
            "number, or schedule.concurrency.kv_tokens"
        )
    for feature, asked in wanted.items():
        if reason := kind.lacks.get(feature):
            raise UserError(
                f"rollout.engine = {recipe.rollout.engine!r} cannot do this: {reason}, and {asked}, or take "
                "rollout.engine=native."
            )

"""The `Schedule`: every way of running one flow, as data. vocabulary.yaml defines the meaning of each field."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import BeforeValidator, Discriminator, Field, create_model, model_validator

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.schedule.concurrency import Adaptive, Concurrency, WholeEpisodes, none_as_null
from interlace.schedule.dispatch import create_dispatch
from interlace.schedule.placement import (
    HOST,
    ROLES,
    AnyPercentage,
    Device,
    Granule,
    Share,
    cut,
    list_placed_roles,
    list_staged_roles,
    resolve,
    role_named,
    share_of,
)
from interlace.schedule.vocabulary import refuse_foreign_words


class NoTail(Config):
    """Waits for the tail."""

    kind: Literal["none"] = "none"


class Oversample(Config):
    """Launches more than is needed and takes the first to finish.

    The rest ends as `surplus`; its prompts come again.
    """

    kind: Literal["oversample"] = "oversample"
    prompts: float = Field(default=1.25, ge=1)
    """Groups launched for each group needed."""
    responses: float = Field(default=1.0, ge=1)
    """Samples launched for each sample needed. The first to finish are shorter, which biases a prompt's samples."""


class TailBatching(Config):
    """Oversampling whose remaining prompts are kept for separate rounds without speculation (RollPacker)."""

    kind: Literal["tail_batching"] = "tail_batching"
    prompts: float = Field(default=1.25, ge=1)
    responses: float = Field(default=1.25, ge=1)
    max_age: int = Field(default=16, ge=1)
    """Largest number of rounds that a prompt waits before a round of long prompts is held for it."""


class Migrate(Config):
    """Moves the unfinished sequences, near the end of a step, to the fewest engines that hold them (RLHFuse).

    The devices of the other engines are then free. If other roles run on the engines' devices, the sequences move as
    soon as one of these roles waits; else at once.
    """

    kind: Literal["migrate"] = "migrate"
    remaining_share: float = Field(default=0.2, gt=0, lt=1)
    """Share of a step's samples. If fewer are unfinished, they are moved."""
    batch: Annotated[int, Field(ge=1)] | AnyPercentage = 48
    """Sequences that one engine then decodes together, or their share of an engine's part of a step (`100%`)."""
    kv_share: float = Field(default=0.1, gt=0, le=1)
    """Share of an engine's KV cache that they may fill. Every step reads it, so long contexts slow each other down."""

    def num_engines(self, num_left: int, held: float, *, samples_per_engine: float) -> int:
        """Returns the fewest engines that hold the unfinished sequences.

        num_left: unfinished sequences. held: KV caches that they fill. samples_per_engine: an engine's part of a step.
        """
        batch = self.batch
        if isinstance(batch, str):
            batch = share_of(batch, samples_per_engine)
        return math.ceil(max(num_left / batch, held / self.kv_share))


AnyTail: TypeAlias = NoTail | Oversample | TailBatching | Migrate
_KINDS = [policy.model_fields["kind"].default for policy in get_args(AnyTail)]


def _expand_name(value: object) -> object:
    """Converts a tail written as its name, or as YAML's null, to a mapping."""
    named = {"kind": value or "none"} if value is None or isinstance(value, str) else value
    if not isinstance(named, Config) and not (isinstance(named, Mapping) and named.get("kind") in _KINDS):
        raise ValueError(
            f"write {', '.join(_KINDS)}, or settings with their kind, such as {{kind: migrate, batch: 48}}"
        )
    return named


Tail: TypeAlias = Annotated[Annotated[AnyTail, Discriminator("kind")], BeforeValidator(_expand_name)]


C = TypeVar("C", bound=Config)


def _is_one(value: Any) -> bool:
    """Returns whether a value is a word or a number. YAML may read devices as a number: 0 is as valid as 0-3."""
    return isinstance(value, str | int) and not isinstance(value, bool)


def _devices(value: Any) -> Any:
    return str(value) if _is_one(value) else value


class RolePlacement(Config):
    """Devices on which a role runs."""

    devices: Annotated[str, BeforeValidator(_devices)] = "all"
    devices_per_instance: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    """Number of devices of one instance. If None, one, or all devices if a run has one instance of the role."""


def _expand_role(value: Any) -> Any:
    return {"devices": value} if _is_one(value) else value


RoleDevices: TypeAlias = Annotated[RolePlacement, BeforeValidator(_expand_role)]


def _with_fields(fields: Mapping[str, Any]) -> Callable[[type[C]], type[C]]:
    """Returns a decorator that adds fields from a table to a model. fields: name -> (type, default)."""

    def add(model: type[C]) -> type[C]:
        name, module, doc = model.__name__, model.__module__, model.__doc__
        return create_model(name, __base__=model, __module__=module, __doc__=doc, **fields)

    return add


@_with_fields(
    {
        role.name: (RoleDevices | None, None) if role.beside else (RoleDevices, RolePlacement(devices=role.devices))
        for role in list_placed_roles()
    }
)
class Placement(Config):
    """Role -> devices.

    Roles on shared devices take turns, roles on disjoint devices form a pipeline; both can be mixed.
    """

    def of(self, role: str) -> RolePlacement:
        """Returns a role's placement. A role without one uses the devices of the role in its `beside` entry."""
        entry = role_named(role)
        own: RolePlacement | None = getattr(self, role)
        return own or RolePlacement(devices=self.of(entry.beside).devices)

    def instances(self, role: str, devices: tuple[Device, ...]) -> tuple[tuple[Device, ...], ...]:
        """Returns the devices of each instance of a role on a cluster. Raises UserError if they do not exist."""
        where, one_instance = self.of(role), role_named(role).one_instance
        if where.devices == HOST:
            return (_on_host(role),)
        size = where.devices_per_instance or ("all" if one_instance else 1)
        found = cut(resolve(where.devices, devices, role=role), None if size == "all" else size, role=role)
        if one_instance and len(found) > 1:
            raise UserError(
                f"placement.{role}: devices_per_instance={size} would make {len(found)} instances of it, and a run has "
                f"one. Leave devices_per_instance out, or give it {size} devices. The recipe sets the number of "
                "data-parallel ranks that share its devices (actor.ranks, critic.ranks)."
            )
        return found


def _expand_placement(value: Any) -> Any:
    """Applies a single value to every role, except roles with a `beside` entry or on the host."""
    return {role.name: value for role in ROLES if role.is_common} if _is_one(value) else value


def _on_host(role: str) -> tuple[Device, ...]:
    """Returns the devices of an instance on the host: none. Raises UserError for a role that computes on devices."""
    if role_named(role).devices != HOST:
        able = ", ".join(entry.name for entry in ROLES if entry.devices == HOST)
        raise UserError(
            f"placement.{role} = {HOST!r}: the role computes on devices; only {able} runs beside them. Name devices, "
            "such as all or 0-50%."
        )
    return ()


@_with_fields({role.name: (Granule | Share, role.granule) for role in list_staged_roles()})
class Granularity(Config):
    """Stage -> granule."""

    def of(self, stage: str) -> Granule | Share:
        granule: Granule | Share = getattr(self, stage)
        return granule


def _expand_granularity(value: Any) -> Any:
    """Applies a single value to every stage, except stages that count environments."""
    common = [role.name for role in list_staged_roles() if not role.counts_envs]
    return dict.fromkeys(common, value) if _is_one(value) else value


class Schedule(Config):
    """Settings that decide how a flow runs. Only schedule/ and runtime/ read its fields."""

    placement: Annotated[Placement, BeforeValidator(_expand_placement)] = Placement()
    granularity: Annotated[Granularity, BeforeValidator(_expand_granularity)] = Granularity()
    max_staleness: float = Field(default=0.0, ge=0)
    """Largest staleness K, in versions. ceil(K) is a hard bound for every sample."""
    pipeline_depth: Annotated[float | None, BeforeValidator(none_as_null)] = Field(default=None, ge=0)
    """Versions that generation may run ahead, 0 ... K. If None, K. A value below K leaves room for stragglers."""
    sync_every: int = Field(default=1, ge=1)
    """Steps per version, S."""
    batching: Literal["step", "arrival"] = "step"
    """Groups of a batch: the prompts admitted for its step, or the first groups to finish within their deadlines."""
    overtake: Annotated[Annotated[float, Field(ge=0, le=1)] | None, BeforeValidator(none_as_null)] = None
    """Size of the window from the oldest group on within which groups may be taken in any order, as a share of the
    groups that may be admitted at once. If None, all."""
    on_straggler: Literal["hold", "drop", "requeue"] = "hold"
    """Action if only the wait for a group keeps its deadline: wait, drop it as stale, or admit its prompt again."""
    publish: Literal["blocking", "background"] = "blocking"
    """Way of publication: the loop waits for the transfer of new weights (blocking), or continues (background)."""
    on_update: Literal["drain", "abort_resume", "keep", "recompute"] = "drain"
    """Treatment of sequences in flight when weights change."""
    weight_update: Literal["all_at_once", "rolling"] = "all_at_once"
    """Order of weight updates. rolling: each engine swaps when it can, so engines may serve different versions."""
    rollout_budget: Annotated[Annotated[int, Field(ge=1)] | AnyPercentage | None, BeforeValidator(none_as_null)] = None
    """Tokens that a sample may grow by in a version, over all its turns (partial rollout), or their share of the mean
    response length so far (`150%`). The rest follows after the next publication."""
    dispatch: str = "round_robin"
    """Policy of schedule/dispatch that assigns requests to engines."""
    prefill_cost: float = Field(default=0.5, ge=0)
    """Time to compute one token of a context again, as a share of the time to decode one token in a batch. A later turn
    waits for the engine that kept its context for at most this cost of the context. The planner takes the value from
    the profile."""
    tail: Tail = NoTail()
    """Policy for the long tail of responses."""
    switch: Literal["when_idle", "when_ready"] = "when_idle"
    """Time at which rollout releases a shared device: when it has no work left, or once another stage is ready."""
    kv_on_switch: Literal["offload", "recompute"] = "offload"
    """Treatment of running sequences' KV cache when their device changes hands: moved to the host, or recomputed."""
    min_hold: float = Field(default=0.0, ge=0)
    """Minimum seconds that rollout keeps a shared device, with `when_ready`."""
    lend_until: Annotated[Annotated[float, Field(gt=0, le=1)] | None, BeforeValidator(none_as_null)] = None
    """Share of a step's batch that, once complete, takes engines off devices that training shares. If None, never."""
    concurrency: Concurrency = None
    """Running sequences per engine. `adaptive` follows the KV use. `episodes` admits whole episodes. If None, only the
    engine's own limits apply."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_foreign_names(cls, data: object) -> object:
        if isinstance(data, Mapping):
            refuse_foreign_words(name for name in data if name not in cls.model_fields)
        return data

    @model_validator(mode="after")
    def _check_consistency(self) -> "Schedule":
        if self.pipeline_depth is not None and self.pipeline_depth > self.max_staleness:
            raise ValueError(
                f"pipeline_depth ({self.pipeline_depth}) is above max_staleness ({self.max_staleness}): it would "
                f"run generation further ahead than any sample may be stale. Lower the first or raise the second"
            )
        if isinstance(self.tail, Oversample | TailBatching) and (self.max_staleness > 0 or self.sync_every > 1):
            raise ValueError(
                f"tail {self.tail.kind!r} works by rounds, a step each, and needs max_staleness 0 and sync_every 1 "
                f"(they are {self.max_staleness:g} and {self.sync_every}). Change them, or use tail none or migrate"
            )
        if self.overtake is not None and self.batching == "step":
            raise ValueError(
                f"overtake {self.overtake:g} sets how far finished groups may overtake older ones, which batching "
                "'step' forbids. Use batching 'arrival', or overtake none"
            )
        if self.on_straggler != "hold" and self.batching == "step":
            raise ValueError(
                f"on_straggler {self.on_straggler!r} lets later groups go first, which batching 'step' forbids. "
                "Use batching 'arrival', or on_straggler 'hold'"
            )
        if self.on_update == "keep" and self.kv_on_switch == "recompute":
            raise ValueError(
                "on_update 'keep' guarantees that a running sequence's KV cache survives an update, but kv_on_switch "
                "'recompute' drops it when its device changes hands: whether it was kept would be chance. Use "
                "kv_on_switch 'offload', or on_update 'recompute'"
            )
        create_dispatch(self.dispatch)  # refuses an unknown policy here, before the run starts
        return self

    @property
    def staleness_bound(self) -> int:
        """Largest lag of a sample in versions: ceil(K)."""
        return math.ceil(self.max_staleness)

    @property
    def adapters_beside(self) -> int:
        """Number of older versions of an adapter that an engine may have to hold in addition to the newest."""
        return self.staleness_bound if self.on_update == "drain" else 0

    @property
    def depth(self) -> float:
        """Versions that generation may run ahead."""
        return self.max_staleness if self.pipeline_depth is None else self.pipeline_depth

    def instances(self, role: str, devices: tuple[Device, ...]) -> tuple[tuple[Device, ...], ...]:
        return self.placement.instances(role, devices)

    def moves_kv_cache(self, devices: tuple[Device, ...]) -> bool:
        """Returns whether running sequences' KV cache is moved to the host while another role uses their device."""
        if self.switch != "when_ready" or self.kv_on_switch != "offload":
            return False
        held = {device for instance in self.instances("rollout", devices) for device in instance}
        others = {
            device
            for role in ROLES
            if role.name != "rollout"
            for instance in self.instances(role.name, devices)
            for device in instance
        }
        return bool(held & others)

    @property
    def follows_kv_use(self) -> bool:
        """True if the number of running sequences follows the use of an engine's KV cache."""
        limit = self.concurrency
        return isinstance(limit, Adaptive) or (isinstance(limit, WholeEpisodes) and limit.kv_tokens is None)

    @property
    def waits_for_swap(self) -> bool:
        """True if a publication ends when all engines have the new weights."""
        return self.publish == "blocking" and self.weight_update == "all_at_once"

    @property
    def steps_ahead(self) -> float:
        """Steps that generation may run ahead."""
        return self.depth * self.sync_every

    @property
    def batches_are_fixed(self) -> bool:
        """True if admission alone determines the groups of a batch."""
        return self.batching == "step" or (self.max_staleness == 0 and self.sync_every == 1)

    def num_versions(self, num_steps: int) -> int:
        """Returns the number of publications in `num_steps` steps."""
        return num_steps // self.sync_every

    def is_evaluation_due(self, step: int, *, eval_every: int) -> bool:
        """Returns whether a step ends with an evaluation.

        An evaluation that falls due between two publications follows with the next one: until then the engines serve
        the weights of an earlier step, whose accuracy would count as the accuracy of this step and of its checkpoint.
        """
        if not eval_every or step % self.sync_every:
            return False
        return step // eval_every > (step - self.sync_every) // eval_every

    def budget_tokens(self, mean_tokens: float) -> int | None:
        """Returns `rollout_budget` in tokens.

        Returns None without a limit. mean_tokens: mean response length so far.
        """
        budget = self.rollout_budget
        return share_of(budget, mean_tokens) if isinstance(budget, str) else budget

    def granule_samples(self, stage: str, *, prompts_per_step: int, samples_per_prompt: int) -> int:
        """Returns the granule of a stage, in samples."""
        return self._granule(stage, prompts_per_step * samples_per_prompt, samples_per_prompt)

    def granule_envs(self, num_envs: int, *, samples_per_prompt: int) -> int:
        """Returns the number of environments, of `num_envs`, that wait for each other before they simulate."""
        return min(num_envs, self._granule("env", num_envs, samples_per_prompt))

    def _granule(self, stage: str, everything: int, group: int) -> int:
        granule = self.granularity.of(stage)
        if isinstance(granule, str) and granule.endswith("%"):
            return share_of(granule, everything)
        named = {"step": everything, "group": group, "sample": 1}
        return named[granule] if isinstance(granule, str) else int(granule)

"""Checks of a recipe that need only its settings: no model, no data, no torch."""

from interlace.algorithms import Algorithm, algorithm_names, create_algorithm
from interlace.core.errors import UserError
from interlace.data.config import SourceConfig
from interlace.data.mixture import check_sources
from interlace.data.warmup import DemonstrationConfig
from interlace.engines.train.config import training_temperature
from interlace.observe.loggers import load_logger
from interlace.rewards.base import load_rewards
from interlace.rewards.config import RewardConfig
from interlace.robots.env_stage import simulators_of
from interlace.rollouts.config import create_kind
from interlace.rollouts.episodes.single_turn import SingleTurnKind
from interlace.rollouts.rendering.load import check_renderer
from interlace.run.recipe.algorithm_by_source import SourceAlgorithm
from interlace.run.recipe.check_learning import check_learning
from interlace.run.recipe.check_objective import check_offline_settings, check_teacher
from interlace.run.recipe.config import Recipe, algorithm_of, is_offline, list_algorithms
from interlace.run.recipe.layout import num_ranks
from interlace.run.recipe.load import check_data_files
from interlace.run.recipe.metric_names import check_best
from interlace.run.recipe.sections import EvaluationConfig
from interlace.schedule.placement import Device, list_placed_roles


def check_new_run(recipe: Recipe, spec: str | None = None, *, has_callbacks: bool = False) -> None:
    """Raises UserError for a mistake in the settings of a run that starts, before torch is loaded.

    spec: name or path of the recipe; None if it has no file. has_callbacks: see check_best().
    """
    check_settings(recipe)
    if spec is not None:
        check_data_files(recipe, spec)
    check_best(recipe, has_callbacks=has_callbacks)


def check_settings(recipe: Recipe, *, is_stored: bool = False) -> None:
    """Raises UserError for settings that contradict each other or have no effect, and for unknown names.

    is_stored: settings of an existing run, which cannot be changed. Those without effect are accepted.
    """
    check_sizes(recipe, algorithm_of(recipe))
    training_temperature(recipe.sampling)
    check_sources(recipe.task)
    _check_episodes(recipe)
    _check_memory_checkpoints(recipe)
    _check_scorer(recipe)
    check_learning(recipe)
    if not is_stored:
        _refuse_unused(recipe)
    _check_best(recipe)
    _check_loggers(recipe)


def _check_episodes(recipe: Recipe) -> None:
    for config in (recipe.episode, *recipe.episode.others.values()):
        create_kind(config).check()
    check_renderer(recipe.renderer)


def _check_memory_checkpoints(recipe: Recipe) -> None:
    """Raises UserError for checkpoints in memory that trainers on other machines do not have, or nothing reads."""
    every, address = recipe.recovery.memory_checkpoint_every, recipe.cluster.address
    if every and recipe.recovery.restarts_per_hour.get("trainer") == 0:
        raise UserError(
            f"recovery.memory_checkpoint_every = {every}: a run that lost a trainer starts again from them, and "
            "recovery.restarts_per_hour.trainer=0 forbids that. Set one of the two to another value."
        )
    if every and recipe.checkpoint_every and every % recipe.checkpoint_every == 0:
        raise UserError(
            f"recovery.memory_checkpoint_every = {every}: with checkpoint_every={recipe.checkpoint_every} each of "
            "these steps has a checkpoint on disk. Set it to fewer steps, or to 0."
        )
    if every and address is not None:
        raise UserError(
            f"recovery.memory_checkpoint_every = {every}, but the trainers of cluster.address = {address!r} may run on "
            "other machines, whose memory this one cannot read. Set it to 0, and checkpoint_every to few steps."
        )


def check_sizes(recipe: Recipe, algorithm: Algorithm) -> None:
    """Raises UserError if the recipe's sizes and its algorithm cannot work together, on any cluster."""
    if algorithm.rows is None:
        for each in list_algorithms(recipe):
            _check_algorithm(recipe, each)
            _check_rewards(recipe, each, is_needed=algorithm.needs.reward)
        check_teacher(recipe, algorithm)
    else:
        check_offline_settings(recipe)
    _check_minibatches(recipe)


def check_placement(recipe: Recipe, devices: tuple[Device, ...]) -> None:
    """Raises UserError if a role is placed on devices that do not exist, or if its ranks do not fit them."""
    if recipe.schedule.open:
        raise UserError(
            "schedule=auto is chosen when `interlace train` starts. Elsewhere name a preset, or have one planned: "
            "`interlace plan` writes a file that schedule=plan.yaml reads."
        )
    simulators, schedule = simulators_of(recipe.episode), recipe.schedule.resolved
    for role in list_placed_roles():
        if role.counts_envs and simulators is None:
            continue  # a schedule for robots may also serve other episodes, on fewer devices
        # Instances of one size and kind pass or fail together; a large cluster has thousands of them.
        instances = schedule.instances(role.name, devices)
        for instance in {(len(each), *(device.pool for device in each[:1])): each for each in instances}.values():
            num_ranks(recipe, role.name, instance)
    if simulators:
        simulators.share(0, len(schedule.instances("env", devices)))


def _check_scorer(recipe: Recipe) -> None:
    of_sources = recipe.task.rewards
    models = [reward for reward in (recipe.reward, *of_sources.values()) if reward and reward.model is not None]
    if of_sources and models:
        raise UserError(
            f"task: the source {next(iter(of_sources))!r} has a reward, and a reward is a model. A model scores all "
            "sources: set it as `reward` of the recipe and remove the rewards of the sources, or take no model."
        )
    for reward, source in _rewards_by_source(recipe):
        if reward.model is None:
            load_rewards(reward)
        if reward.name == "reasoning_gym" and source.reasoning_gym is None:
            raise UserError(
                "reward reasoning_gym scores prompts of a reasoning_gym dataset, and the prompts come from another "
                "source. Take reward=exact, reward=math_verify, or a function of your own."
            )


def _rewards_by_source(recipe: Recipe) -> list[tuple[RewardConfig, SourceConfig]]:
    """Returns the reward of each source, without the sources whose episodes give the reward."""
    if not recipe.task.mixture:
        return [] if recipe.reward is None else [(recipe.reward, recipe.task)]
    found = [(source.reward or recipe.reward, source) for source in recipe.task.mixture]
    return [(reward, source) for reward, source in found if reward is not None]


def _check_algorithm(recipe: Recipe, chosen: SourceAlgorithm) -> None:
    name, algorithm = chosen.name, chosen.algorithm
    if algorithm.is_group_relative and recipe.samples_per_prompt == 1:
        others = [each for each in algorithm_names() if not create_algorithm(each, {}).is_group_relative]
        raise UserError(
            f"samples_per_prompt=1 leaves algorithm {name!r} nothing to learn from: it compares the samples of each "
            "prompt. Set samples_per_prompt to 2 or more, or take an algorithm that compares no samples: "
            f"{', '.join(others)}."
        )
    if algorithm.needs.greedy_baseline:
        _check_baseline(recipe)
    if algorithm.needs.critic and algorithm.needs.process_reward:
        raise UserError(f"algorithm {name!r} needs a critic and a process reward model; a run can have only one.")


def _check_baseline(recipe: Recipe) -> None:
    name, hint = recipe.algorithm.name, "take an algorithm without a greedy baseline, such as grpo."
    for config in (recipe.episode, *recipe.episode.others.values()):
        if not isinstance(create_kind(config), SingleTurnKind):
            raise UserError(
                f"algorithm {name!r} compares samples with a greedy response to the same prompt, which episode "
                f"{config.name!r} does not make. Take episode=single_turn, or {hint}"
            )
    if recipe.reward is None:
        raise UserError(
            f"algorithm {name!r} compares samples with a greedy response, which the recipe's `reward` scores, and it "
            f"has none. Set one, or {hint}"
        )


def _check_rewards(recipe: Recipe, chosen: SourceAlgorithm, *, is_needed: bool) -> None:
    """Checks rewards that settings bound. For other rewards, the algorithm checks each value during the run.

    is_needed: an algorithm of the run needs rewards.
    """
    reward = recipe.task.rewards.get(chosen.source, recipe.reward)
    episodes = (recipe.episode, *recipe.episode.others.values())
    without = next((each.name for each in episodes if not create_kind(each).brings_reward), None)
    if reward is None and (without is None or not is_needed):
        return
    if reward is None:
        raise UserError(
            f"the recipe has no `reward`, and episode {without!r} gives no reward: there would be nothing to learn "
            "from. Set reward=exact, reward=math_verify, or a function of your own as "
            "reward=package.module:function."
        )
    if chosen.algorithm.needs.process_reward:
        _check_success(recipe, reward)
    least, wanted = reward.least, chosen.algorithm.min_reward
    if least is None or wanted is None or least >= wanted:
        return
    shaping = reward.shaping.max_penalty
    correct, incorrect = wanted + shaping + 1, wanted + shaping
    fix = f"Raise them, such as reward.correct={correct:g} reward.incorrect={incorrect:g}"
    if chosen.source in recipe.task.rewards:
        written = f"{{name: {reward.name}, correct: {correct:g}, incorrect: {incorrect:g}}}"
        fix = f"Raise them in the source {chosen.source!r}, such as reward: {written}"
    raise UserError(
        f"algorithm {chosen.name!r} takes rewards of {wanted:g} or more, and with "
        f"reward.correct={reward.correct:g}, reward.incorrect={reward.incorrect:g}"
        + (f" and up to {shaping:g} taken off by reward.shaping" if shaping else "")
        + f" a response may get {least:g}. {fix}, or take another algorithm."
    )


def _check_success(recipe: Recipe, reward: RewardConfig) -> None:
    """Raises UserError if a process reward model would learn that wrong responses are right, or that all are wrong.

    A penalty of `reward.shaping` may make a right response count as wrong; others count as right.
    """
    bound = recipe.critic.success_reward
    is_verdict = reward.least is not None and ":" not in reward.name
    if is_verdict and not reward.incorrect <= bound < reward.correct:
        raise UserError(
            f"critic.success_reward={bound:g}: the process reward model learns that responses with more reward are "
            f"right, and with reward.correct={reward.correct:g}, reward.incorrect={reward.incorrect:g} it does not "
            "separate right from wrong ones. Set it between the two."
        )


def _check_minibatches(recipe: Recipe) -> None:
    prompts, minibatches = recipe.prompts_per_step, recipe.minibatches
    if prompts % minibatches:
        fitting = [count for count in range(1, min(prompts, 1024) + 1) if prompts % count == 0]
        raise UserError(
            f"prompts_per_step={prompts} cannot be cut into minibatches={minibatches} of equal size. "
            f"Set minibatches to one of {', '.join(map(str, fitting))}, "
            f"or prompts_per_step to a multiple of {minibatches}."
        )


def _check_best(recipe: Recipe) -> None:
    """Raises UserError for a metric that the settings of the evaluation leave out."""
    best, evaluation = recipe.best, recipe.evaluation
    if best is None or not best.is_evaluated:
        return
    if not recipe.eval_every:
        raise UserError(
            f"best.metric = {best.metric!r} is measured by evaluations, and with eval_every=0 there is none between "
            "the first and the last step. Set eval_every, or take a metric of each step, such as reward/mean."
        )
    k = best.metric.rpartition("/pass@")[2]
    if "/pass@" in best.metric and k not in map(str, evaluation.pass_at):
        raise UserError(
            f"best.metric = {best.metric!r}: evaluation.pass_at={list(evaluation.pass_at)} does not measure it. Add "
            "the number to it."
        )
    if best.metric.endswith("/accuracy_sampled") and not evaluation.samples_per_prompt:
        raise UserError(
            f"best.metric = {best.metric!r}: evaluation.samples_per_prompt=0 samples no answers. Set it to 1 or more, "
            "or take eval/accuracy_greedy."
        )


def _check_loggers(recipe: Recipe) -> None:
    for name in recipe.logging.loggers or ():
        load_logger(name)
    traced = recipe.logging.trace_steps
    if traced and traced[1] > recipe.steps:
        raise UserError(
            f"logging.trace_steps={list(traced)}, but the run ends with step {recipe.steps}. Name steps up to it, or "
            "raise steps."
        )


def _refuse_unused(recipe: Recipe) -> None:
    """Raises UserError for a setting of the evaluation or the written examples without effect, by another setting."""
    if is_offline(recipe):
        _check_offline_evaluation(recipe)
    _check_answers(recipe)
    _check_writers(recipe)
    _check_overlong(recipe)


def _check_overlong(recipe: Recipe) -> None:
    """Raises UserError for an overlong penalty that no response of a single turn can get."""
    most = recipe.sampling.max_new_tokens
    for reward, _ in _rewards_by_source(recipe):
        limit, buffer = reward.shaping.overlong_limit, reward.shaping.overlong_buffer
        if recipe.episode.is_single_turn and limit is not None and limit - buffer >= most:
            raise UserError(
                f"reward.shaping.overlong_limit={limit} with overlong_buffer={buffer} takes nothing off a response of "
                f"up to {limit - buffer} tokens, and sampling.max_new_tokens={most} permits no longer one. Set "
                f"overlong_limit={most} with an overlong_buffer, or a smaller overlong_limit."
            )


def _check_answers(recipe: Recipe) -> None:
    evaluation, default = recipe.evaluation, EvaluationConfig()
    if evaluation.temperature != default.temperature and not evaluation.samples_per_prompt:
        raise UserError(
            f"evaluation.temperature={evaluation.temperature:g} is of sampled answers, and "
            "evaluation.samples_per_prompt=0 samples none. Set samples_per_prompt to 1 or more, or remove temperature."
        )
    if evaluation.filmed != default.filmed and (simulators_of(recipe.episode) is None or not evaluation.num_shown):
        raise UserError(
            f"evaluation.filmed={evaluation.filmed} chooses episodes of a robot, and none is filmed: the episode "
            f"{recipe.episode.name!r} has no simulators, or evaluation.num_shown is 0. Remove evaluation.filmed."
        )


def _check_offline_evaluation(recipe: Recipe) -> None:
    """Raises UserError for settings of sampled answers: an evaluation computes the loss of held-out rows."""
    evaluation = recipe.evaluation
    sampled = {
        "pass_at": bool(evaluation.pass_at),
        "temperature": evaluation.temperature != 1,
        "samples_per_prompt": evaluation.samples_per_prompt > 1,
    }
    if found := next((key for key, is_set in sampled.items() if is_set), None):
        raise UserError(
            f"evaluation.{found} is of sampled answers, and algorithm {recipe.algorithm.name!r} evaluates the loss of "
            "held-out rows. Remove the setting; `interlace eval` samples answers by another recipe (--recipe)."
        )


def _check_writers(recipe: Recipe) -> None:
    """Raises UserError for written completions of rows that have completions, or of a run without given rows."""
    task, warmup = recipe.task, recipe.warmup
    if warmup is not None and warmup.experts is not None and warmup.demonstrations != DemonstrationConfig():
        raise UserError(
            "warmup.demonstrations write texts, and with warmup.experts the warm-up imitates a robot's expert. Remove "
            "one of them."
        )
    if task.demonstrations is None:
        return
    if algorithm_of(recipe).rows is None:
        raise UserError(
            f"task.demonstrations write the completions of sft, dpo and reward_model, and algorithm "
            f"{recipe.algorithm.name!r} trains on responses of the policy. Remove it; a warm-up has "
            "warmup.demonstrations."
        )
    if not any(source.reasoning_gym for source in (task, *task.mixture, *task.heldout_sets.values())):
        raise UserError(
            "task.demonstrations write the completions of generated prompts, and the rows of the task have their own. "
            "Remove it."
        )

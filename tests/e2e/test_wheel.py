"""The wheel and the image of Docker hold everything that the quick start needs."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import interlace

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "interlace")
SHORT = ("steps=2", "warmup.steps=8", "warmup.until=null", "eval_every=0", "cluster.devices=cpu:2")
CLI = "from interlace.cli.main import app; app()"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy of the sources, as `pip wheel` does from a checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source / name)
    into = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(into), str(source)], check=True, timeout=240)
    [found] = into.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_has_the_version_and_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.name == f"interlace-{interlace.__version__}-py3-none-any.whl"
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "interlace"
    ours = {
        f"interlace/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    assert not ours - inside


@pytest.mark.slow
def test_the_installed_wheel_trains_the_quick_start_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    packages, elsewhere = tmp_path / "packages", tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
    subprocess.run([*command, str(wheel)], check=True, timeout=240)
    environment = os.environ | {"PYTHONPATH": str(packages)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=280,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    place = run("-c", "import interlace; print(interlace.__file__)")
    assert Path(place.strip()).is_relative_to(packages), "the wheel is the tested package"
    assert "Held-out accuracy" in run("-c", CLI, "train", "quickstart", *SHORT)
    run("-c", CLI, "report", "quickstart")
    assert (elsewhere / "runs/quickstart/report.html").stat().st_size > 100_000
    assert "recipe.yaml" in run("-c", CLI, "init", "mine")


def _docker_is_running() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.slow
def test_the_image_of_docker_trains_the_quick_start() -> None:
    if not _docker_is_running():
        pytest.skip("docker is not installed, or its daemon does not run")
    subprocess.run(["docker", "build", "--tag", "interlace-test", str(ROOT)], check=True, timeout=1800)
    command = ["docker", "run", "--rm", "interlace-test", "train", "quickstart", *SHORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    assert "Held-out accuracy" in done.stdout

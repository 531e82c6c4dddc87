"""The files of examples/deploy fit the schemas of the systems that read them."""

import copy
import subprocess

import kubernetes_validate
import pytest
import yaml

from interlace.run.recipe.load import load_recipe
from tests.house.source import ROOT

DEPLOY = ROOT / "examples" / "deploy"
KUBERNETES = "1.31"


def test_the_recipe_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe("examples/deploy/qwen7b.yaml", [])
    assert recipe.rollout.engine == "vllm"
    assert recipe.model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("response", "reward"), [("so 1,200 apples", 1.0), ("#### 1200.0", 1.0), ("1200 or 7", 0.0), ("none", 0.0)]
)
def test_the_reward_reads_the_last_number(response: str, reward: float) -> None:
    scope: dict[str, object] = {}
    exec((DEPLOY / "gsm8k.py").read_text(encoding="utf-8"), scope)
    assert scope["reward"](response, "12 * 100 = <<12*100=1200>>\n#### 1,200") == reward  # type: ignore[operator]


def test_the_objects_of_plain_pods_fit_the_schemas() -> None:
    objects = list(yaml.safe_load_all((DEPLOY / "pods.yaml").read_text(encoding="utf-8")))
    assert [each["kind"] for each in objects] == ["Service", "NetworkPolicy", "StatefulSet", "Job"]
    for each in objects:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_the_pods_of_the_ray_job_fit_the_schemas() -> None:
    spec = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text(encoding="utf-8"))["spec"]["rayClusterSpec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert len(groups) == 2
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **copy.deepcopy(group["template"])}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_the_batch_file_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sbatch"], check=True)


def test_the_signal_of_slurm_reaches_the_run_and_not_the_steps_of_ray() -> None:
    text = (DEPLOY / "slurm.sbatch").read_text(encoding="utf-8")
    assert "#SBATCH --signal=B:TERM@" in text and "\nexec srun" in text

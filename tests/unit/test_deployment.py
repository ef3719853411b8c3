"""Check the manifests of examples/ that no test runs: fields by the formats' references, and commands by their parsers."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_mcore.cli.agent import _parser
from rlhf_mcore.config.keys import KEYS
from rlhf_mcore.metrics.catalogue import GROUPS
from rlhf_mcore.observability.prometheus import metric_name

ROOT = Path(__file__).resolve().parents[2]
# Fields of JobSet v1alpha2, batch/v1 Job and core/v1 Pod that the manifest may use, by their path; [] is an element of a list.
JOBSET = """
apiVersion kind metadata.name spec.network.enableDNSHostnames spec.network.publishNotReadyAddresses spec.failurePolicy.maxRestarts
spec.failurePolicy.rules[].name spec.failurePolicy.rules[].action spec.failurePolicy.rules[].onJobFailureReasons[]
spec.replicatedJobs[].name spec.replicatedJobs[].replicas
"""
JOB = """
parallelism completions completionMode backoffLimit podFailurePolicy.rules[].action podFailurePolicy.rules[].onExitCodes.containerName
podFailurePolicy.rules[].onExitCodes.operator podFailurePolicy.rules[].onExitCodes.values[]
template.metadata.annotations.prometheus.io/scrape template.metadata.annotations.prometheus.io/port
"""
POD = """
restartPolicy terminationGracePeriodSeconds volumes[].name volumes[].configMap.name volumes[].persistentVolumeClaim.claimName
volumes[].emptyDir.medium volumes[].emptyDir.sizeLimit
"""
CONTAINER = """
name image workingDir command[] args[] env[].name env[].value env[].valueFrom.fieldRef.fieldPath ports[].name ports[].containerPort
resources.requests.cpu resources.requests.memory resources.limits.memory resources.limits.nvidia.com/gpu
volumeMounts[].name volumeMounts[].mountPath volumeMounts[].readOnly
"""
INSIDE = {
    "spec.replicatedJobs[].template.spec.": JOB,
    "spec.replicatedJobs[].template.spec.template.spec.": POD,
    "spec.replicatedJobs[].template.spec.template.spec.containers[].": CONTAINER,
}
# https://docs.skypilot.co/en/latest/reference/yaml-spec.html
SKY = """
name num_nodes resources.accelerators resources.image_id resources.use_spot resources.job_recovery.max_restarts_on_errors
resources.job_recovery.recover_on_exit_codes[] envs.CONFIG envs.PORT workdir volumes./outputs run
"""
SKY_VARIABLES = {"NODE_IPS", "NODE_RANK", "NUM_NODES", "NUM_GPUS_PER_NODE", "TASK_ID"}


def fields(tree: Any, path: str = "") -> list[str]:
    if isinstance(tree, dict):
        return [found for key, value in tree.items() for found in fields(value, f"{path}.{key}" if path else key)]
    if isinstance(tree, list):
        return [found for value in tree for found in fields(value, f"{path}[]")]
    return [path]


def arguments_of_agent(script: str) -> list[str]:
    """Return the agent's arguments, with variables as written."""
    command = script.replace("\\\n", " ").rpartition("rlhf_mcore.cli.agent")[2]
    return [re.sub(r"\$\w+", "1", word) for word in shlex.split(command)]


@pytest.fixture(scope="module")
def jobset() -> Any:
    return yaml.safe_load((ROOT / "examples/kubernetes/jobset.yaml").read_text())


def test_the_jobset_has_known_fields_alone(jobset: Any) -> None:
    known = {*JOBSET.split(), *(prefix + name for prefix, names in INSIDE.items() for name in names.split())}
    assert set(fields(jobset)) - known == set()
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


def test_the_jobset_agrees_with_itself(jobset: Any) -> None:
    """Kubernetes rejects some errors only when a pod starts, and others never."""
    [job] = jobset["spec"]["replicatedJobs"]
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert int(env["NODES"]) == spec["parallelism"] == spec["completions"]
    assert env["RANKS_PER_NODE"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert env["FIRST"] == f"$(JOBSET_NAME)-{job['name']}-0-0.$(JOBSET_NAME)"  # jobset-job-index-pod.subdomain
    assert spec["completionMode"] == "Indexed" and pod["restartPolicy"] == "Never"  # pod failure policies require it
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    [rule] = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"] and rule["onExitCodes"]["values"] == [2, 76]
    script = container["args"][0]
    used = set(re.findall(r"\$(\w+)", script)) - {"address"}
    assert used == {*env, "JOB_COMPLETION_INDEX"}  # an Indexed job sets it
    assert spec["template"]["metadata"]["annotations"]["prometheus.io/port"] in script


@pytest.mark.parametrize("file", ["examples/kubernetes/jobset.yaml", "examples/skypilot.yaml"])
def test_what_a_manifest_starts_is_understood(file: str) -> None:
    tree = yaml.safe_load((ROOT / file).read_text())
    script = (
        tree.get("run")
        or tree["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    )
    args = _parser().parse_intermixed_args(arguments_of_agent(script))
    assert args.nodes == args.ranks_per_node == 1 and args.port and args.run_id
    for override in args.overrides:
        assert override.partition("=")[0] in KEYS, override


def test_the_task_of_skypilot_has_known_fields_and_variables_alone() -> None:
    task = yaml.safe_load((ROOT / "examples/skypilot.yaml").read_text())
    assert set(fields(task)) - set(SKY.split()) == set()
    assert set(re.findall(r"\$SKYPILOT_(\w+)", task["run"])) <= SKY_VARIABLES
    assert (ROOT / task["envs"]["CONFIG"]).exists()


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    dashboard = json.loads((ROOT / "examples/grafana/rlhf_mcore.json").read_text())
    known = {metric_name(metric.name) for group in GROUPS.values() for metric in group} | {"rlhf_mcore_step"}
    known |= {f"rlhf_mcore_timing_{phase}_s" for phase in ("generate", "update", "sync")}  # timing/<phase>_s
    known |= {f"rlhf_mcore_engine_{name}" for name in ("up", "version", "requests", "tokens_total", "failures")}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 20
    for expression in expressions:
        shown = set(re.findall(r"rlhf_mcore_\w+", expression))
        assert shown and shown <= known, expression
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"source", "project", "experiment"}

"""What `ringlet manifest` prints, against the schemas of Kubernetes and of Kubeflow's Trainer."""

import subprocess
import sys

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

WITH_RAY = [  # whose program says the rest
    "--name", "train", "--image", "me/train", "--nodes", "3", "--gpus", "4",
    "--cpu", "8", "--memory", "16Gi", "--volume", "data:/data", "--volume", "kept:/kept",
    "--env", "SEED=7", "--restarts", "2", "--namespace", "work", "--fusion-threshold-mb", "32",
]  # fmt: skip
USUAL = [*WITH_RAY, "--slots", "4", "--start-timeout", "900"]
COMMAND = ["python", "train.py", "--name", "a: b", "#1", "yes", "1e3", "it's", "\u00e4\n"]


def render(kind, *more, words=USUAL):
    ran = subprocess.run(
        [sys.executable, "-m", "ringlet", "manifest", "--kind", kind, *words, *more, "--",
         *COMMAND],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return list(yaml.safe_load_all(ran.stdout))


def strict(document):
    kubernetes_validate.validate(document, "1.32", strict=True)


def pods(value):
    """Yield the pod templates in a document."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for each in value.values():
            yield from pods(each)
    elif isinstance(value, list):
        for each in value:
            yield from pods(each)


def strict_pod(template):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}
    strict(pod)


def test_a_job_needs_no_operator():
    secret, service, job = render("Job")
    for document in (secret, service, job):
        strict(document)
        assert document["metadata"]["namespace"] == "work"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    place = ["--nodes", "3", "--slots", "4", "--service", "train", "--start-timeout", "900", "--"]
    assert container["command"] == ["ringlet", "node", *place, *COMMAND]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert {"name": "SEED", "value": "7"} in container["env"]
    assert len(secret["stringData"]["secret"]) == 64
    assert secret["stringData"] != render("Job")[0]["stringData"]


def test_an_elastic_job_forgives_what_evicts_its_pods():
    _, _, job = render("Job", "--min-nodes", "2", "--max-nodes", "5")
    strict(job)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    place = ["--nodes", "5", "--slots", "4", "--service", "train", "--min-np", "8"]
    assert container["command"][: 2 + len(place)] == ["ringlet", "node", *place]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 5
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    evicted = {"type": "DisruptionTarget", "status": "True"}
    assert rule == {"action": "Ignore", "onPodConditions": [evicted]}
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_a_trainjob_is_one_of_kubeflows():
    _, job = render("TrainJob")
    model = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert model.to_dict() == job  # nothing that the model does not know
    assert model.spec.trainer.num_nodes == 3
    assert model.spec.trainer.num_proc_per_node == 4
    bare = render("TrainJob", words=["--name", "t", "--image", "i"])[1]
    assert models.TrainerV1alpha1TrainJob.from_dict(bare).to_dict() == bare


def test_a_jobset_holds_a_valid_job():
    secret, jobset = render("JobSet")
    strict(secret)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    strict({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"},
            **replicated["template"]})  # fmt: skip
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 2}


@pytest.mark.parametrize("kind", ["MPIJob", "RayJob"])
@pytest.mark.parametrize("elastic", [(), ("--min-nodes", "2", "--max-nodes", "5")])
def test_pods_of_operators_are_valid(kind, elastic):
    (document,) = render(kind, *elastic, words=WITH_RAY if kind == "RayJob" else USUAL)
    found = list(pods(document))
    assert len(found) == 2
    for template in found:
        strict_pod(template)
    words = str(document)
    assert ("discover_hosts" in words or "enableInTreeAutoscaling" in words) == bool(elastic)
    if kind == "RayJob":
        group = document["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
        bounds = group["minReplicas"], group["replicas"], group["maxReplicas"]
        assert bounds == ((2, 3, 5) if elastic else (3, 3, 3))

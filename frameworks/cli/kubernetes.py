"""Objects of Kubernetes for a job: plain ones, and those of Kubeflow, JobSet and KubeRay."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringlet.ring.placed.whereabouts import PORT

Document = dict[str, Any]

_EVICTED = {"type": "DisruptionTarget", "status": "True"}


@dataclass(frozen=True)
class WantedJob:
    """A job of ``nodes`` pods with ``slots`` ranks each, as the command line asks for it.

    ``fewest`` and ``most`` bound the pods of an elastic job (None: it is none). ``volumes`` are
    claims, each with a path that it appears at. ``secret`` is what pods know each other by.
    """

    name: str
    image: str
    command: Sequence[str]
    nodes: int
    slots: int
    secret: str = field(repr=False)
    gpus: int = 0
    resources: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    volumes: Sequence[tuple[str, str]] = ()
    options: Sequence[str] = ()
    restarts: int = 0
    fewest: int | None = None
    most: int | None = None
    namespace: str | None = None
    ray_version: str = "2.60.0"

    def meta(self, suffix: str = "") -> Document:
        """Return the metadata of an object."""
        found: Document = {"name": self.name + suffix}
        return found | ({"namespace": self.namespace} if self.namespace else {})

    def limits(self) -> Document:
        """Return what a container takes."""
        found: Document = dict(self.resources)
        return found | ({"nvidia.com/gpu": str(self.gpus)} if self.gpus else {})

    def variables(self, secret: bool = True) -> list[Document]:
        """Return the environment of a container, with the job's secret or without."""
        found: list[Document] = [{"name": n, "value": as_is(v)} for n, v in self.env.items()]
        if secret:
            key = {"name": f"{self.name}-secret", "key": "secret"}
            found.append({"name": "RINGLET_SECRET", "valueFrom": {"secretKeyRef": key}})
        return found

    def mounts(self) -> list[Document]:
        """Return where volumes appear in a container."""
        return [
            {"name": f"volume{self._claimed().index(claim)}", "mountPath": path}
            for claim, path in self.volumes
        ]

    def claims(self) -> list[Document]:
        """Return the volumes of a pod."""
        return [
            {"name": f"volume{i}", "persistentVolumeClaim": {"claimName": claim}}
            for i, claim in enumerate(self._claimed())
        ]

    def _claimed(self) -> list[str]:
        return list(dict.fromkeys(claim for claim, _ in self.volumes))

    def container(self, name: str, command: Sequence[str] | None, secret: bool) -> Document:
        """Return a container of a pod."""
        found: Document = {"name": name, "image": self.image}
        parts = {
            "command": [as_is(word) for word in command or ()],
            "env": self.variables(secret),
            "resources": {"limits": limits} if (limits := self.limits()) else {},
            "volumeMounts": self.mounts(),
        }
        return found | {key: value for key, value in parts.items() if value}

    def pod(self, container: Document, **more: Any) -> Document:
        """Return a pod's template."""
        claims = {"volumes": claims} if (claims := self.claims()) else {}
        return {"spec": {**more, "containers": [container], **claims}}

    def node_command(self, *place: str) -> list[str]:
        """Return the command of each pod that is a node."""
        return ["ringlet", "node", *place, *self.options, "--", *self.command]

    def hidden(self) -> Document:
        """Return the Secret by which pods know each other."""
        return {
            "apiVersion": "v1", "kind": "Secret", "metadata": self.meta("-secret"),
            "type": "Opaque", "stringData": {"secret": self.secret},
        }  # fmt: skip


def as_is(text: str) -> str:
    """Return what Kubernetes makes ``text`` of, in a container's command or environment.

    It puts variables, the job's secret among them, into the place of $(NAME), and $ into that of
    two.
    """
    return text.replace("$", "$$") if re.search(r"\$[$(]", text) else text


def _indexed(wanted: WantedJob, service: str) -> Document:
    """Return the specification of an indexed Job whose pods are named by ``service``."""
    pods = wanted.most or wanted.nodes
    place = ["--nodes", str(pods), "--slots", str(wanted.slots), "--service", service]
    if wanted.fewest is not None:
        place += ["--min-np", str(wanted.fewest * wanted.slots)]
    container = wanted.container("ranks", wanted.node_command(*place), True)
    container["ports"] = [{"containerPort": PORT}]
    found: Document = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": wanted.restarts * pods,  # of pods, which all fail together
        "template": wanted.pod(container, restartPolicy="Never", subdomain=service),
    }
    if wanted.fewest is not None:  # a pod that is evicted begins anew, and is no failure
        ignored = {"action": "Ignore", "onPodConditions": [_EVICTED]}
        found["podFailurePolicy"] = {"rules": [ignored]}
        # The first node's end is the job's: others may still be on their way to it.
        found["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return found


def job(wanted: WantedJob) -> list[Document]:
    """Return a plain indexed Job, the headless Service that names its pods, and the Secret."""
    service: Document = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": wanted.meta(),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the first node waits for others before it is
            "selector": {"batch.kubernetes.io/job-name": wanted.name},
            "ports": [{"name": "ringlet", "port": PORT}],
        },
    }
    batch = {"apiVersion": "batch/v1", "kind": "Job", "metadata": wanted.meta()}
    return [wanted.hidden(), service, batch | {"spec": _indexed(wanted, wanted.name)}]


def jobset(wanted: WantedJob) -> list[Document]:
    """Return a JobSet with one replicated job, and the Secret."""
    spec = _indexed(wanted, wanted.name) | {"backoffLimit": 0}  # the set begins anew as a whole
    del spec["template"]["spec"]["subdomain"]  # which JobSet sets
    found: Document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": wanted.meta(),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "publishNotReadyAddresses": True,
                "subdomain": wanted.name,
            },
            "failurePolicy": {"maxRestarts": wanted.restarts},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}],
        },
    }
    return [wanted.hidden(), found]


def trainjob(wanted: WantedJob) -> list[Document]:
    """Return a TrainJob of Kubeflow's Trainer (runtime torch-distributed), and the Secret."""
    trainer: Document = {
        "image": wanted.image,
        "command": [as_is(word) for word in wanted.node_command()],
        "numNodes": wanted.nodes,
        "numProcPerNode": wanted.slots,
        "env": wanted.variables(),
    }
    if limits := wanted.limits():
        trainer["resourcesPerNode"] = {"limits": limits}
    spec: Document = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    if wanted.volumes:
        container = {"name": "node", "volumeMounts": wanted.mounts()}
        pod = {"spec": {"containers": [container], "volumes": wanted.claims()}}
        node = {"name": "node", "template": {"spec": {"template": pod}}}
        patch = {"template": {"spec": {"replicatedJobs": [node]}}}
        spec["runtimePatches"] = [{"manager": "ringlet", "trainingRuntimeSpec": patch}]
    found: Document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": wanted.meta(),
        "spec": spec,
    }
    return [wanted.hidden(), found]


def mpijob(wanted: WantedJob) -> list[Document]:
    """Return an MPIJob of Kubeflow's MPI operator, whose launcher runs ``ringlet run`` over ssh."""
    run = ["ringlet", "run", "--transport", "gloo"]
    for name, value in wanted.env.items():  # sshd gives programs an environment of its own
        run += ["--env", f"{name}={value}"]
    if wanted.fewest is None:
        run += ["--hostfile", "/etc/mpi/hostfile"]
    else:
        most = wanted.most or wanted.nodes
        run += ["-np", str(wanted.nodes * wanted.slots)]
        run += ["--min-np", str(wanted.fewest * wanted.slots)]
        run += ["--max-np", str(most * wanted.slots)]
        run += ["--host-discovery-script", "/etc/mpi/discover_hosts.sh"]
        run += ["--slots-per-host", str(wanted.slots)]
    launcher: Document = {"name": "launcher", "image": wanted.image}
    words = [*run, *wanted.options, "--", *wanted.command]
    launcher["command"] = [as_is(word) for word in words]
    launcher["env"] = wanted.variables(secret=False)
    worker = wanted.container("worker", ["/usr/sbin/sshd", "-De"], False)
    found: Document = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": wanted.meta(),
        "spec": {
            "slotsPerWorker": wanted.slots,
            "mpiImplementation": "OpenMPI",
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": wanted.restarts},
            "mpiReplicaSpecs": {
                "Launcher": {
                    "replicas": 1,
                    "restartPolicy": "Never",
                    "template": {"spec": {"containers": [launcher]}},
                },
                "Worker": {"replicas": wanted.nodes, "template": wanted.pod(worker)},
            },
        },
    }
    return [found]


def rayjob(wanted: WantedJob) -> list[Document]:
    """Return a RayJob of KubeRay's, whose entry point is the command: it calls ``ringlet.ray``."""
    elastic = wanted.fewest is not None
    head = wanted.container("head", None, False)
    head.pop("resources", None)  # ranks are on the workers
    worker = wanted.container("worker", None, False)
    cluster: Document = {
        "rayVersion": wanted.ray_version,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},
            "template": wanted.pod(head),
        },
        "workerGroupSpecs": [
            {
                "groupName": "ranks",
                "replicas": wanted.nodes,
                "minReplicas": wanted.fewest if elastic else wanted.nodes,
                "maxReplicas": wanted.most or wanted.nodes,
                "rayStartParams": {},
                "template": wanted.pod(worker),
            }
        ],
    }
    if elastic:
        cluster = {"enableInTreeAutoscaling": True, **cluster}
    found: Document = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": wanted.meta(),
        "spec": {
            "entrypoint": shlex.join(wanted.command),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": wanted.restarts,
            "rayClusterSpec": cluster,
        },
    }
    return [found]


KINDS: dict[str, Callable[[WantedJob], list[Document]]] = {
    "Job": job,
    "TrainJob": trainjob,
    "MPIJob": mpijob,
    "JobSet": jobset,
    "RayJob": rayjob,
}
ELASTIC = ("Job", "MPIJob", "RayJob")

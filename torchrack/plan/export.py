"""The plan for those who have a scheduler: an sbatch script, or a Kubernetes JobSet. Pure.

Names, NICs and addresses are the scheduler's to give, so they are found at start; all else is as in the plan.
JobSet: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrack.model.errors import UsageError
from torchrack.plan.plan import Plan
from torchrack.plan.render import environment, quoted
from torchrack.plan.settings import Setting

BY_NODE = frozenset({"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"})
SHM = "8Gi"


def common(plan: Plan) -> tuple[Setting, ...]:
    """The variables that are the same on every node, NIC pins left out."""
    each = [{s.name: s for s in (*node.of_kind("env"), *node.of_kind("nccl"))} for node in plan.nodes]
    first = each[0]
    return tuple(
        s for name, s in first.items()
        if name not in BY_NODE and all(name in own and own[name].value == s.value for own in each)
    )  # fmt: skip


def sbatch(plan: Plan, command: Sequence[str], *, name: str, deadline: float, gpus: int = 0) -> str:
    """A script for sbatch. Raises UsageError for a plan whose nodes share no subnet, or that is not c10d."""
    _only_c10d(plan)
    net = plan.job.endpoint_net if plan.job.pin == "none" else plan.job.pin
    try:
        subnet = plan.rack.subnet(net)
    except ValueError as error:
        raise UsageError(
            f"the nodes share no {net} subnet to find their NICs by", "FILE=rack.yaml names one"
        ) from error
    # NIC and address of the first IPv4 address in the subnet.
    find = f"ip -o -4 addr show to {subnet} | " + "awk '\\''NR == 1 {{ {} }}'\\''"
    return environment().get_template("sbatch.sh.j2").render(
        plan=plan,
        subnet=subnet,
        common=common(plan),
        command=command,
        name=name,
        minutes=max(1, -(-int(deadline) // 60)),
        gpus=gpus,
        find_address=find.format('sub("/.*", "", $4); print $4'),
        find_nic=find.format('sub("/.*", "", $4); print $2, $4'),
    )  # fmt: skip


def jobset(
    plan: Plan, command: Sequence[str], *, name: str, deadline: float, image: str, gpus: int = 0
) -> dict[str, Any]:
    """A JobSet of one indexed Job with a pod a node, as data for YAML. Raises UsageError unless the plan is c10d."""
    _only_c10d(plan)
    job, nodes = plan.job, plan.rack.nodes
    # Pods have one NIC, so nothing is pinned; the first pod's name is the headless service's that JobSet makes.
    script = (
        f"exec torchrun --nnodes={nodes} --nproc-per-node={job.nproc} --max-restarts={job.max_restarts}"
        f" --rdzv-backend=c10d --rdzv-id={name} --rdzv-endpoint={name}-node-0-0.{name}:{job.port}"
        ' --local-addr="$POD_IP" --rdzv-conf="is_host=$((JOB_COMPLETION_INDEX == 0)),'
        f'join_timeout={plan.join_bound}" ' + " ".join(quoted(word) for word in command)
    )
    env = [{"name": s.name, "value": s.value} for s in common(plan)]
    env.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})  # type: ignore[dict-item]
    container: dict[str, Any] = {
        "name": "agent",
        "image": image,
        "command": ["bash", "-c", script],
        "env": env,
        "ports": [{"containerPort": job.port}],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        # A container's own /dev/shm is 64 MiB, too small for NCCL.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM}}],
    }
    indexed = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "activeDeadlineSeconds": int(deadline),
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": indexed}}],
        },
    }


def _only_c10d(plan: Plan) -> None:
    if plan.job.mode != "c10d" or plan.job.elastic:
        raise UsageError("a scheduler's job is exported with mode c10d and a fixed number of nodes", "MODE=c10d")

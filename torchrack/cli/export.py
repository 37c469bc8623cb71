"""torchrack export: the plan as a job for a scheduler."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

from torchrack.cli import options as o


def register(app: typer.Typer) -> None:
    app.command()(export)


def export(
    script: Annotated[str, typer.Argument(help="The script, as its path is on the nodes.")],
    to: Annotated[str, typer.Option("--to", help="slurm or k8s.")],
    nodes: o.Nodes = None,
    rack: o.RackName = None,
    file: o.RackFile = None,
    nproc: o.Nproc = None,
    pin: o.Pin = None,
    port: o.Port = None,
    env: o.EnvOption = None,
    args_text: Annotated[str, typer.Option("--args", help="Arguments for the script, split as a shell would.")] = "",
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs a node.", min=0)] = 0,
    image: Annotated[str, typer.Option("--image", help="The container image (k8s).")] = "torchrack-cuda:latest",
    name: Annotated[str, typer.Option("--name", help="The job's name.")] = "torchrack",
    deadline: o.Deadline = 1800.0,
    subnet: Annotated[
        str | None, typer.Option("--subnet", help="The cluster's data network, such as 10.1.0.0/16 (slurm).")
    ] = None,
) -> None:
    """Print an sbatch script or a Kubernetes JobSet from the same plan that deploy uses. Nothing is started."""
    import yaml

    from torchrack.cli import asked
    from torchrack.model.errors import UsageError
    from torchrack.plan.export import jobset, sbatch
    from torchrack.run.preview import preview

    if not script.strip():
        raise UsageError("no script given", "make export TO=slurm SCRIPT=train.py")
    job = asked.job(env, nproc=nproc, pin=pin, port=port)
    wanted = asked.rack(file, name=rack, nodes=nodes, fabric_subnet=subnet)
    made = preview(wanted, job, os.cpu_count() or 1)
    command, limit = (script, *shlex.split(args_text)), deadline or 1800.0
    if to == "slurm":
        print(sbatch(made, command, name=name, deadline=limit, gpus=gpus))
        if wanted.fabric_subnet is None:
            found = made.rack.subnet("fabric")
            print(f"! the data network is the pretend rack's, {found}: SUBNET=… names your cluster's", file=sys.stderr)
    elif to == "k8s":
        print(yaml.safe_dump(jobset(made, command, name=name, deadline=limit, image=image, gpus=gpus), sort_keys=False))
        print(f"! the image {image} must hold torchrun and {script}: IMAGE=…; GPUS=8 asks for cards", file=sys.stderr)
    else:
        raise UsageError(f"{to!r} is no scheduler known here", "--to slurm or --to k8s")

"""torchrack export: the plan as a job for a scheduler."""

from __future__ import annotations

import os
import shlex
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
) -> None:
    """Print an sbatch script or a Kubernetes JobSet from the same plan that deploy uses. Nothing is started."""
    import yaml

    from torchrack.cli import asked
    from torchrack.model.errors import UsageError
    from torchrack.plan.export import jobset, sbatch
    from torchrack.run.preview import preview

    job = asked.job(env, nproc=nproc, pin=pin, port=port)
    made = preview(asked.rack(file, name=rack, nodes=nodes), job, os.cpu_count() or 1)
    command, limit = (script, *shlex.split(args_text)), deadline or 1800.0
    if to == "slurm":
        print(sbatch(made, command, name=name, deadline=limit, gpus=gpus), end="")
    elif to == "k8s":
        found = jobset(made, command, name=name, deadline=limit, image=image, gpus=gpus)
        print(yaml.safe_dump(found, sort_keys=False), end="")
    else:
        raise UsageError(f"{to!r} is no scheduler known here", "--to slurm or --to k8s")

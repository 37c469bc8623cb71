"""Options that several commands share. Imports nothing but typer: `--help` must not wait for what commands need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Nodes = Annotated[str | None, typer.Option("--nodes", "-n", help="Nodes, 1 to 32.", metavar="N")]
Nproc = Annotated[str | None, typer.Option("--nproc", help="Ranks a node, 1 to 8.", metavar="N")]
Runtime = Annotated[str | None, typer.Option("--runtime", help="auto, compose or netns.")]
RackName = Annotated[str | None, typer.Option("--rack", help="The rack's name (lab).")]
Shm = Annotated[str | None, typer.Option("--shm", help="Size of each node's /dev/shm, such as 64m or 1g.")]
RackFile = Annotated[Path | None, typer.Option("--file", "-f", help="A rack file: name, nodes, runtime, shm, subnets…")]
Pin = Annotated[
    str | None, typer.Option("--pin", help="The network that gloo and NCCL are pinned to: fabric, mgmt, none.")
]
Mode = Annotated[str | None, typer.Option("--mode", help="c10d, static or standalone.")]
Launcher = Annotated[str | None, typer.Option("--launcher", help="torchrun, or fork: torch imported once a node.")]
Elastic = Annotated[str | None, typer.Option("--elastic", help="MIN:MAX nodes.")]
Restarts = Annotated[str | None, typer.Option("--max-restarts", help="Restarts of all ranks after one fails.")]
EnvOption = Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE for every rank; repeatable.")]
Deadline = Annotated[float | None, typer.Option("--deadline", help="Seconds the run may take.", min=1)]
Hosts = Annotated[
    str | None, typer.Option("--hosts", help="user@a,user@b:2222, or an Ansible inventory in YAML.", metavar="HOSTS")
]
HostKeysOption = Annotated[
    str, typer.Option("--host-keys", help="known: only keys in known_hosts; accept-new: pin new ones and tell them.")
]
KnownHosts = Annotated[Path | None, typer.Option("--known-hosts", help="In place of ~/.ssh/known_hosts.")]
AllowPublic = Annotated[
    bool, typer.Option("--allow-public", help="The data addresses may be public: a firewall protects the ports.")
]
TorchOption = Annotated[
    str,
    typer.Option("--torch", help="python: as it is there; venv, image: the kit brings it; auto: where there is none."),
]
Port = Annotated[str | None, typer.Option("--port", help="The rendezvous port (29400).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]

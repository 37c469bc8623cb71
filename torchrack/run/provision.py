"""provision: hand the hosts, with each one's NCCL settings from the plan, to ansible-playbook."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from torchrack.model.errors import NotInstalled
from torchrack.model.hosts import Host
from torchrack.model.job import Job
from torchrack.plan.networks import placed
from torchrack.plan.plan import plan
from torchrack.plan.render import node_files
from torchrack.run.deploy import Rented, sure
from torchrack.run.folder import checkout, write_json
from torchrack.run.phases import HostPhase, Progress

# Pipelining: one ssh exec a task in place of three and a file transfer.
SETTINGS = {"ANSIBLE_HOST_KEY_CHECKING": "true", "ANSIBLE_PIPELINING": "true", "ANSIBLE_FORKS": "32"}
PLAYBOOK = checkout() / "ansible" / "provision.yml"


def provision(hosts: Rented, named: str, job: Job, progress: Progress, *, check: bool, extra: Mapping[str, str]) -> int:
    """Run the playbook with its output on our streams; returns its exit status. `named` is HOSTS as it was given."""
    tool = playbook_command()
    with progress.phase(HostPhase.HOSTS) as said:
        reports = {node: sure(answer) for node, answer in hosts.place.each(hosts.place.report).items()}
        rack, facts = placed(hosts.rack, hosts.place.hosts, tuple(reports.values()))
        files = node_files(plan(rack, facts, job))
        said.append(f"{len(reports)} answer")
    hosts.folder.make()
    inventory = hosts.folder.place / "provision.json"
    conf = {host: files[node]["nccl.conf"].decode() for node, host in zip(reports, hosts.place.hosts, strict=True)}
    write_json(inventory, inventory_of(conf))
    # The user's own inventory first: what it says of sudo, for instance, is Ansible's business.
    sources = [named] if Path(named).is_file() else []
    argv = [tool, *(f"--inventory={path}" for path in (*sources, inventory)), *(["--check", "--diff"] if check else [])]
    argv += [f"--extra-vars={json.dumps({'torchrack_port': job.port, **extra})}"]
    if hosts.place.trust.known_hosts:
        argv += [f"--ssh-common-args=-o UserKnownHostsFile={hosts.place.trust.known_hosts}"]
    return subprocess.run([*argv, str(PLAYBOOK)], env={**os.environ, **SETTINGS}).returncode


def inventory_of(conf: Mapping[Host, str]) -> dict[str, object]:
    """What Ansible must know of each host; JSON is YAML."""
    hosts = {}
    for host, nccl in conf.items():
        known = {
            "ansible_host": host.address,
            "ansible_user": host.user,
            "ansible_port": host.port,
            "ansible_ssh_private_key_file": host.key,
            "torchrack_nccl_conf": nccl,
        }
        hosts[host.name] = {name: value for name, value in known.items() if value is not None}
    return {"all": {"hosts": hosts}}


def playbook_command() -> str:
    """ansible-playbook, from this venv or from PATH; raises NotInstalled."""
    beside = Path(sys.executable).with_name("ansible-playbook")
    found = str(beside) if beside.exists() else shutil.which("ansible-playbook")
    if not found:
        raise NotInstalled("provisioning needs ansible-playbook", f"{sys.executable} -m pip install ansible-core")
    return found

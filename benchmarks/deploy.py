"""make deploy-bench: deploy and an unchanged re-deploy, beside Ansible and pyinfra, against the same sshd hosts.

The hosts are nodes of a netns rack on this machine, each behind a real sshd; client and hosts share its cores: quote
ratios of one run. Every tool gets the same files, the same keys and as many hosts at once. Ansible takes its fastest
way (one archive, unarchive, pipelining, no fact gathering); pyinfra puts one archive and unpacks it if that changed.
`torchrack deploy` does more than both: it asks every host for its facts, judges them, probes the data network before
the first push, verifies what arrived, and switches on all hosts or on none.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from sshd import Machines, Quiet, machines  # noqa: E402

PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - file: {{path: "{{{{ torchrack_folder }}}}/ansible", state: directory}}
    - unarchive: {{src: {tar}, dest: "{{{{ torchrack_folder }}}}/ansible"}}
"""
ANSIBLE_CFG = """
[defaults]
forks = {forks}
gathering = explicit
remote_tmp = {tmp}
local_tmp = {tmp}
[ssh_connection]
pipelining = true
ssh_args = -F none -o ControlMaster=auto -o ControlPersist=60s -o UserKnownHostsFile={known} -o IdentitiesOnly=yes
control_path_dir = {tmp}/cp
"""
PYINFRA_DEPLOY = """
from pyinfra import host
from pyinfra.operations import files, server

folder = host.data.torchrack_folder + "/pyinfra"
put = files.put(src={tar!r}, dest=folder + "/payload.tgz")
server.shell(commands=[f"tar xzf {{folder}}/payload.tgz -C {{folder}}"], _if=put.did_change)
"""


@dataclass(frozen=True)
class Taken:
    """One command: wall seconds, CPU-milliseconds of the client a host, ssh sessions a host."""

    seconds: float
    cpu_ms: float
    sessions: float


def measured(argv: Sequence[str], there: Machines, **kwargs: object) -> Taken:
    """Run it to its end; a command that fails shows what it said."""
    before, sessions, start = resource.getrusage(resource.RUSAGE_CHILDREN), started(there), time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, **kwargs)  # type: ignore[call-overload]
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):  # 3: passed with warnings
        sys.exit(f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    count = len(there.all)
    return Taken(seconds, 1000 * cpu / count, (started(there) - sessions) / count)


def started(there: Machines) -> int:
    """Sessions that the hosts' sshd have logged: one for each command or file transfer."""
    time.sleep(0.3)
    return sum(log.read_text(errors="replace").count("Starting session:") for log in there.keys.glob("node*.log"))


def payload_tar(there: Machines, rack: str, target: Path) -> Path:
    """The files of a node, as they were just deployed, in one archive."""
    current = (there.all[0].folder / rack / "node0" / "current").resolve()
    with tarfile.open(target, "w:gz", compresslevel=1) as tar:
        for path in sorted(current.rglob("*")):
            if path.is_file():
                tar.add(path, str(path.relative_to(current)))
    return target


def ours(there: Machines, work: Path, rack: str) -> list[str]:
    hosts = there.inventory(work / "hosts.yml")
    return [
        str(BIN / "torchrack"), "deploy", "--hosts", str(hosts), "--rack", rack,
        "--known-hosts", str(there.known_hosts), "--json",
    ]  # fmt: skip


def ansible(there: Machines, work: Path, tar: Path) -> tuple[list[str], dict[str, str]]:
    inventory = json.loads((work / "hosts.yml").read_text())
    for host in inventory["all"]["hosts"].values():
        host |= {"ansible_python_interpreter": sys.executable, "ansible_remote_tmp": f"{host['torchrack_folder']}/tmp"}
    (work / "ansible.yml").write_text(json.dumps(inventory))
    (work / "play.yml").write_text(PLAYBOOK.format(tar=tar))
    config = ANSIBLE_CFG.format(forks=len(there.all), tmp=work / "a", known=there.known_hosts)
    (work / "ansible.cfg").write_text(config)
    argv = [str(BIN / "ansible-playbook"), "-i", str(work / "ansible.yml"), str(work / "play.yml")]
    return argv, os.environ | {"ANSIBLE_CONFIG": str(work / "ansible.cfg")}


def pyinfra(there: Machines, work: Path, tar: Path, program: str) -> tuple[list[str], dict[str, str]]:
    rows = [
        (host.name, {
            "ssh_hostname": host.address, "ssh_port": host.port, "ssh_user": host.user, "ssh_key": host.key,
            "ssh_known_hosts_file": str(there.known_hosts), "torchrack_folder": host.folder,
        })
        for host in there.hosts()
    ]  # fmt: skip
    (work / "inventory.py").write_text(f"hosts = {rows!r}\n")
    (work / "play.py").write_text(PYINFRA_DEPLOY.format(tar=str(tar)))
    return [program, "-y", "--parallel", str(len(rows)), str(work / "inventory.py"), str(work / "play.py")], {
        **os.environ
    }


def rounds(there: Machines, work: Path, times: int = 3) -> tuple[float, float, float]:
    """Seconds of a bare round (each host runs python3 -c pass), of preflight's first round, and of its second.

    Connections are new each time; medians of alternated rounds.
    """
    from torchrack.model.job import Job
    from torchrack.model.rack import Rack
    from torchrack.places.ssh import Ssh
    from torchrack.places.ssh_connect import Trust
    from torchrack.run.phases import Progress
    from torchrack.run.preflight import network, preflight

    def place() -> Ssh:
        return Ssh("rounds", work / "rounds", there.hosts(), Trust("known", there.known_hosts))

    def bare(hosts: Ssh) -> None:
        done = hosts.each(lambda node: hosts.shell(node, f"exec {sys.executable} -c pass"))
        assert set(done.values()) == {(0, "")}, done

    say, rack = Progress(Quiet()), Rack(name="rounds", nodes=len(there.all), runtime="ssh")
    found = preflight(place(), rack, Job(), say, probes=False)
    assert not found.bad(), found.bad()[:3]
    measures: list[Callable[[Ssh], object]] = [
        bare,
        lambda hosts: preflight(hosts, rack, Job(), say, probes=False),
        lambda hosts: network(hosts, found, Job(), say),
    ]
    taken: list[list[float]] = [[] for _ in measures]
    for _ in range(times):
        for seconds, measure in zip(taken, measures, strict=True):
            hosts = place()
            start = time.monotonic()
            measure(hosts)
            seconds.append(time.monotonic() - start)
            hosts.close()
    first, second, third = (statistics.median(seconds) for seconds in taken)
    return first, second, third


def bench(count: int, program: str | None, show: Callable[[str], None]) -> tuple[dict[str, list[Taken]], float]:
    """First and unchanged deploy by each tool, on the same hosts; preflight's first round over a bare one."""
    found: dict[str, list[Taken]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="torchrack-bench-") as folder,
        machines(f"deploy-bench-{os.getpid()}", count, Path(folder) / "there") as there,
    ):
        work, rack = Path(folder), "bench"
        env = os.environ | {"TORCHRACK_HOME": folder}
        command = ours(there, work, rack)
        found["torchrack"] = [measured(command, there, env=env) for _ in range(2)]
        tar = payload_tar(there, rack, work / "payload.tgz")
        show(f"{count} hosts, {tar.stat().st_size / 1000:.0f} kB of files a host, compressed")
        argv, given = ansible(there, work, tar)
        found["ansible"] = [measured(argv, there, env=given) for _ in range(2)]
        if program:
            argv, given = pyinfra(there, work, tar, program)
            found["pyinfra"] = [measured(argv, there, env=given, cwd=work) for _ in range(2)]
        bare, facts, probes = rounds(there, work)
        beside = f"{facts / bare:.2f}× a bare round of {bare:.1f} s"
        show(f"  preflight: facts and checks {facts:.1f} s ({beside}), network {probes:.1f} s")
    return found, facts / bare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--pyinfra", help="the pyinfra command, from a virtual environment of its own")
    asked = parser.parse_args()
    results = {}
    for count in asked.hosts:
        results[count], factor = bench(count, asked.pyinfra, lambda line: print(line, flush=True))
        print(f"  {'':<10} {'first':>8} {'again':>8}   {'CPU ms/host':>15}   {'sessions/host':>15}")
        for tool, (first, again) in results[count].items():
            print(
                f"  {tool:<10} {first.seconds:7.1f}s {again.seconds:7.1f}s   {first.cpu_ms:7.0f} {again.cpu_ms:7.0f}"
                f"   {first.sessions:7.1f} {again.sessions:7.1f}",
                flush=True,
            )
    return verdict(results, factor)


def verdict(results: dict[int, dict[str, list[Taken]]], factor: float) -> int:
    """The goals at the largest size, each said with its ratio."""
    small, large = results[min(results)], results[max(results)]
    mine = large["torchrack"]
    growth = [big.cpu_ms / few.cpu_ms for big, few in zip(mine, small["torchrack"], strict=True)]
    goals = [
        (f"preflight's first round takes {factor:.2f}× a bare one", factor <= 2),
        (f"again: {mine[1].sessions:.1f} round trips a host", mine[1].sessions <= 1),
        (
            f"CPU a host from {min(results)} to {max(results)} hosts: {growth[0]:.2f}× first, {growth[1]:.2f}× again",
            max(growth) <= 1.1,
        ),
    ]
    for tool, factor in (("ansible", 5), ("pyinfra", 1)):
        if tool in large:
            ratios = [theirs.seconds / own.seconds for theirs, own in zip(large[tool], mine, strict=True)]
            goals.append(
                (f"{tool} takes {ratios[0]:.1f}× as long first, {ratios[1]:.1f}× again", min(ratios) >= factor)
            )
    for text, ok in goals:
        print(f"{'✓' if ok else '✗'} {text}")
    return 0 if all(ok for _, ok in goals) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The playbook on a real host with root: what it writes, that a second run changes nothing, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from racks import Cli, Done, wait_until
from sshd import keygen

pytestmark = [pytest.mark.docker, pytest.mark.ssh, pytest.mark.slow]
# The image reaches no package mirror, and runs no systemd: what needs these is looked at by hand (ansible/README.md).
OFFLINE = ("--var", "torchrack_packages=false")


def docker(*args: str, stdin: str = "") -> str:
    done = subprocess.run(["docker", *args], input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """(container, address, folder with user, known_hosts): a machine that lets root in by key."""
    folder = tmp_path_factory.mktemp("host")
    user, key = keygen(folder / "user"), keygen(folder / "hostkey")
    name = f"torchrack-test-provision-{os.getpid()}"
    docker(
        "run",
        "--detach",
        "--rm",
        "--name",
        name,
        "--user",
        "0",
        "--shm-size",
        "1g",
        "torchrack-cpu:latest",
        "sleep",
        "3600",
    )
    try:
        home = "mkdir -p /run/sshd ~/.ssh && chmod 700 ~/.ssh"
        docker("exec", name, "sh", "-c", home)
        for source, target in ((f"{user}.pub", "~/.ssh/authorized_keys"), (str(key), "/run/hostkey")):
            write = f"cat > {target} && chmod 600 {target}"
            docker("exec", "-i", name, "sh", "-c", write, stdin=Path(source).read_text())
        docker("exec", "--detach", name, "/usr/sbin/sshd", "-D", "-h", "/run/hostkey")
        address = docker("inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", name)
        kind, text, *_ = Path(f"{key}.pub").read_text().split()
        (folder / "known_hosts").write_text(f"{address} {kind} {text}\n")
        assert wait_until(lambda: "sshd" in docker("exec", name, "sh", "-c", "cat /proc/[0-9]*/cmdline"), 10)
        time.sleep(0.3)
        yield name, address, folder
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True)


def provision(host: tuple[str, str, Path], home: Path, *more: str) -> Done:
    _, address, folder = host
    inventory = home / "hosts.yml"
    inventory.write_text(
        f"all:\n  hosts:\n    box:\n      ansible_host: {address}\n      ansible_user: root\n"
        f"      ansible_ssh_private_key_file: {folder / 'user'}\n      ansible_python_interpreter: /opt/venv/bin/python\n"
        "      torchrack_python: /opt/venv/bin/python\n"
    )
    named = ("--hosts", str(inventory), "--known-hosts", str(folder / "known_hosts"))
    return Cli(home, "ssh", "remote")("provision", *named, *OFFLINE, *more, timeout=600)


def test_a_check_changes_nothing_then_all_is_written_and_the_second_run_is_clean(
    host: tuple[str, str, Path], tmp_path: Path
) -> None:
    name = host[0]
    dry = provision(host, tmp_path, "--check")
    assert dry.returncode == 0, dry.stdout + dry.stderr
    assert (
        "memlock unlimited" in dry.stdout
        and docker("exec", name, "sh", "-c", "test -e /etc/nccl.conf || echo no") == "no"
    )
    first = provision(host, tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    written = docker(
        "exec",
        name,
        "sh",
        "-c",
        "cat /etc/security/limits.d/90-torchrack.conf /etc/nccl.conf /etc/torchrack/firewall.nft",
    )
    assert "* hard memlock unlimited" in written and "NCCL_SOCKET_IFNAME==eth0" in written
    assert f"elements = {{ {host[1]} }}" in written and "tcp dport { 29400, 32768-60999 } drop" in written
    assert "RemoveIPC=no" in docker("exec", name, "cat", "/etc/systemd/logind.conf.d/90-torchrack.conf")
    second = provision(host, tmp_path)
    assert second.returncode == 0 and "changed=0" in second.stdout, second.stdout

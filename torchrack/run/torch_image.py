"""torch on hosts from the kit's own image: which hosts can run it, and the image brought there over ssh."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from select import select
from typing import IO

from torchrack.model.errors import Lacking, TorchrackError, Unreachable
from torchrack.model.health import Report
from torchrack.places.image import Image, built
from torchrack.places.ssh import Ssh
from torchrack.places.ssh_process import RemoteProcess
from torchrack.places.ssh_push import STALL_S
from torchrack.places.talk import hear
from torchrack.run.phases import Progress

NODE = Path(__file__).parents[1] / "node"
SCRIPT, IN_IMAGE = (NODE / "image.py").read_text(), (NODE / "in_image.sh").read_text()
ASK_S = 30.0
UNPACKED_S = 900.0  # seconds for Docker to take in what arrived; CUDA's layers are gigabytes
PIECE = 1 << 20
TICK = 0.5
MB = 1_000_000
TOLD = 20 * MB  # bytes between two words of progress


def images(place: Ssh, reports: Mapping[str, Report]) -> dict[str, Image | TorchrackError]:
    """For each host of the reports the image that it can run, `cuda` where it has GPUs; or what is against it."""

    @cache
    def here(target: str) -> Image | TorchrackError:
        try:
            return built(target)
        except TorchrackError as error:
            return error

    def act(node: str) -> Image | None:
        if node not in reports:
            return None
        gpus = bool(reports[node].health.gpus)
        image = here("cuda" if gpus else "cpu")
        if isinstance(image, TorchrackError):
            raise image
        with place.system_python(node, SCRIPT, "ask") as process:
            process.bound(ASK_S)
            told = hear(process)
        return suitable(image, gpus, str(told["machine"]), bool(told["nvidia"]))

    return {node: answer for node, answer in place.each(act).items() if answer is not None}


def suitable(image: Image, gpus: bool, machine: str, nvidia: bool) -> Image:
    """The image, if a host whose Docker said this can run it. Raises Lacking."""
    if machine != image.machine:
        raise Lacking(f"the image is for {image.machine}, and the host is {machine}", "TORCH=venv")
    if gpus and not nvidia:
        fix = "make provision HOSTS=… VAR=torchrack_containers=true"
        raise Lacking("Docker there has no NVIDIA container toolkit, and would not see the GPUs", fix)
    return image


def bring(place: Ssh, node: str, image: Image, gpus: bool, progress: Progress) -> str:
    """Send the image unless it is there, and make the host's Python one that runs in it. Raises Lacking."""
    words = [place.host(node).folder, image.tag, image.digest, "all" if gpus else "", IN_IMAGE]
    with place.system_python(node, SCRIPT, "bring", *words) as process:
        process.bound(STALL_S)
        if hear(process)["want"]:
            progress.console.update(f"{node}: Docker here packs {image.tag}")
            for sent in _sent(process, image.tag):
                progress.console.update(f"{node}: sent {sent // MB} of about {image.size // MB} MB of {image.tag}")
            progress.console.update(f"{node}: Docker there unpacks {image.tag}")
        process.bound(UNPACKED_S)
        return str(hear(process)["python"])


def _sent(process: RemoteProcess, tag: str) -> Iterator[int]:
    """Stream the image, and yield how many bytes went so far."""
    with subprocess.Popen(["docker", "save", tag], bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as save:
        assert save.stdout and save.stderr
        try:
            yield from _copied(save.stdout, process)
        except BaseException as error:
            save.kill()
            if isinstance(error, TimeoutError):
                silent = f"took nothing for {STALL_S:.0f} s"
                raise Unreachable("reachable", silent, "is the machine all right?") from None
            if isinstance(error, OSError):
                return  # the host's last words say why
            raise
        if save.wait():
            raise Lacking(f"docker save {tag}: {save.stderr.read().decode(errors='replace').strip()}")
    process.stdin.close()


def _copied(source: IO[bytes], process: RemoteProcess) -> Iterator[int]:
    sent = told = 0
    while True:
        while not select([source], [], [], TICK)[0]:  # Docker may think for a minute before the first byte
            if process.poll() is not None:
                raise BrokenPipeError
        piece = source.read(PIECE)
        if not piece:
            return
        process.stdin.write(piece)
        sent += len(piece)
        if sent - told >= TOLD:
            told = sent
            yield sent

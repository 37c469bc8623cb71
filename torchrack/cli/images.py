"""torchrack image and setup: what nodes are made of, made ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer

from torchrack.cli import options as o


def register(app: typer.Typer) -> None:
    app.command("image")(image)
    app.command("base-image")(base_image)
    app.command("setup")(setup)


def image(
    target: Annotated[str, typer.Option("--target", help="cpu or cuda.")] = "cpu",
    extra: Annotated[str, typer.Option("--extra", help="More Python packages, separated by blanks.")] = "",
) -> None:
    """Build the nodes' image; unchanged, it is there at once."""
    from torchrack.cli.console import progress
    from torchrack.run.images import build_image

    print(build_image(progress().console.update, target, extra))


def base_image() -> None:
    """Build the base image with mmdebstrap, where no image registry can be reached."""
    from torchrack.cli.console import progress
    from torchrack.run.images import build_base

    print(build_base(progress().console.update))


def setup(runtime: o.Runtime = None) -> None:
    """Install or build what the chosen runtime needs, without bringing a rack up."""
    from torchrack.cli import asked
    from torchrack.cli.console import progress
    from torchrack.run.folder import RackFolder
    from torchrack.run.lifecycle import choose

    say = progress()
    request = asked.rack(None, runtime=runtime)
    place, why = choose(request.name, request.runtime, RackFolder(request.name))
    say.console.note(f"runtime   {place.kind} ({why})")
    place.prepare(say.console.update)
    say.console.note("✓ ready")

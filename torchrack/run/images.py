"""Building what compose nodes are made of, for the CLI, which never imports places."""

from __future__ import annotations

from torchrack.places.image import build_base, build_image

__all__ = ["build_base", "build_image"]

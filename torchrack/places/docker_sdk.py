"""The Docker SDK, imported for 0.1 s less: of its start, most goes into paramiko, which only an ssh:// engine needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Only where no such engine can be meant: docker itself looks at these.
_NAMED = any(os.environ.get(name) for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG"))
_LOCAL = not (_NAMED or Path("~/.docker/contexts").expanduser().exists())
_HIDDEN = _LOCAL and "paramiko" not in sys.modules
if _HIDDEN:
    sys.modules["paramiko"] = None  # type: ignore[assignment]  # "not installed", with which the SDK is content
try:
    from docker import APIClient, from_env
    from docker.context import ContextAPI
    from docker.errors import APIError, DockerException, NotFound
finally:
    if _HIDDEN:
        del sys.modules["paramiko"]

__all__ = ["APIClient", "APIError", "ContextAPI", "DockerException", "NotFound", "from_env"]

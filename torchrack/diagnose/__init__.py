"""Logs of all ranks in, one verdict out: layer, kind, culprit, evidence, why, and the next command.

Pure: reads text only, knows nothing of racks. Facts first (collect.py), then findings (derive_*.py), then one decision
(decide.py). The rules are data: rules/<layer>.yaml.
"""

from torchrack.diagnose.answer import Diagnosis, Evidence, Other
from torchrack.diagnose.decide import diagnose, diagnose_folder
from torchrack.diagnose.findings import Who
from torchrack.diagnose.lookup import Explanation, lookup
from torchrack.diagnose.rules import Kind, kinds
from torchrack.diagnose.sources import Source

__all__ = [
    "KINDS",
    "Diagnosis",
    "Evidence",
    "Explanation",
    "Kind",
    "Other",
    "Source",
    "Who",
    "diagnose",
    "diagnose_folder",
    "kinds",
    "lookup",
]

KINDS = kinds()

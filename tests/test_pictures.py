"""Pictures: what a lab describes becomes an SVG that shows it; what describes nothing is left out."""

from __future__ import annotations

import json
from pathlib import Path

from torchrack.teach.pictures import draw_all

GANTT = {
    "kind": "gantt",
    "title": "Schedule",
    "x": "ms",
    "rows": [{"name": "rank 0", "bars": [{"start": 0, "end": 2, "label": "F0", "group": "forward"}]}],
}
LINES = {
    "kind": "lines",
    "title": "Fit",
    "x": "bytes",
    "y": "seconds",
    "log": True,
    "series": [{"name": "measured", "style": "dots", "points": [[1, 1], [10, 2]]}, {"name": "none", "points": []}],
}
BARS = {
    "kind": "bars",
    "title": "Experts",
    "x": "expert",
    "y": "tokens",
    "labels": ["0", "1"],
    "series": [{"name": "sent", "values": [3, 4]}, {"name": "kept", "values": [3, 2]}],
}


def test_each_kind_is_drawn_and_rubbish_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out" / "rank0"
    out.mkdir(parents=True)
    for name, picture in {"-a": GANTT, "-b": LINES, "-c": BARS, "-d": {"kind": "cake"}}.items():
        (out / f"picture{name}.json").write_text(json.dumps(picture))
    (out / "picture.json").write_text("not JSON")
    drawn = draw_all(tmp_path)
    assert [path.name for path in drawn] == ["picture-a.svg", "picture-b.svg", "picture-c.svg"]
    assert all("</svg>" in path.read_text() for path in drawn)


def test_a_record_without_pictures_costs_nothing(tmp_path: Path) -> None:
    assert draw_all(tmp_path) == []

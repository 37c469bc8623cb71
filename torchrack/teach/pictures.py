"""Pictures that labs describe in $OUT/picture*.json, drawn as SVG beside the run's record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from torchrack.model.rack import Model

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Bar(Model):
    start: float
    end: float
    label: str = ""
    group: str = ""
    """Bars of one group have one colour."""


class Row(Model):
    name: str
    bars: tuple[Bar, ...]


class Gantt(Model):
    """Who did what when: a row a rank or stage, time from left to right in the unit `x`."""

    kind: Literal["gantt"]
    title: str
    x: str
    rows: tuple[Row, ...]


class Line(Model):
    name: str
    style: Literal["line", "dots"] = "line"
    points: tuple[tuple[float, float], ...]


class Lines(Model):
    """Curves and measured points over x; `log`: both axes."""

    kind: Literal["lines"]
    title: str
    x: str
    y: str
    log: bool = False
    series: tuple[Line, ...]


class Values(Model):
    name: str
    values: tuple[float, ...]


class Bars(Model):
    """A group of bars for each label, one a series."""

    kind: Literal["bars"]
    title: str
    x: str
    y: str
    labels: tuple[str, ...]
    series: tuple[Values, ...]


Picture = Annotated[Gantt | Lines | Bars, Field(discriminator="kind")]
_PARSE: TypeAdapter[Gantt | Lines | Bars] = TypeAdapter(Picture)


def draw_all(record: Path) -> list[Path]:
    """Draw every picture*.json that a rank left in the record's out/; returns the SVG files, made in the record.

    A file that describes no picture is left out: a picture is never what a run fails for.
    """
    drawn = []
    for source in sorted((record / "out").glob("rank*/picture*.json")):
        try:
            picture = _PARSE.validate_json(source.read_bytes())
        except ValidationError:
            continue
        svg = record / f"{source.stem}.svg"
        draw(picture, svg)
        drawn.append(svg)
    return drawn


def draw(picture: Gantt | Lines | Bars, svg: Path) -> None:
    """Draw one picture to an SVG file, without a display."""
    from matplotlib.figure import Figure

    rows = len(picture.rows) if isinstance(picture, Gantt) else 8
    figure = Figure(figsize=(10, 1.5 + 0.5 * rows), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(picture.title)
    axes.set_xlabel(picture.x)
    _BY_KIND[picture.kind](axes, picture)
    figure.savefig(svg)


def _gantt(axes: Axes, picture: Gantt) -> None:
    groups = list(dict.fromkeys(bar.group for row in picture.rows for bar in row.bars))
    for place, row in enumerate(picture.rows):
        for bar in row.bars:
            width = bar.end - bar.start
            axes.barh(place, width, 0.8, bar.start, color=f"C{groups.index(bar.group) % 10}", edgecolor="white")
            axes.text(bar.start + width / 2, place, bar.label, ha="center", va="center", fontsize=8, clip_on=True)
    axes.set_yticks(range(len(picture.rows)), [row.name for row in picture.rows])
    axes.invert_yaxis()


def _lines(axes: Axes, picture: Lines) -> None:
    for line in picture.series:
        x, y = zip(*line.points, strict=True) if line.points else ((), ())
        axes.plot(x, y, "o" if line.style == "dots" else "-", label=line.name)
    if picture.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_ylabel(picture.y)
    axes.legend()


def _bars(axes: Axes, picture: Bars) -> None:
    width = 0.8 / max(1, len(picture.series))
    for i, series in enumerate(picture.series):
        places = [place + (i - (len(picture.series) - 1) / 2) * width for place in range(len(series.values))]
        axes.bar(places, series.values, width, label=series.name)
    axes.set_xticks(range(len(picture.labels)), picture.labels)
    axes.set_ylabel(picture.y)
    axes.legend()


_BY_KIND: dict[str, Callable[[Axes, object], None]] = {"gantt": _gantt, "lines": _lines, "bars": _bars}  # type: ignore[dict-item]

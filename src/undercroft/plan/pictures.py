"""Pictures of a study, by matplotlib, which is installed with `undercroft[plan]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from math import log2
from pathlib import Path
from typing import Any

from undercroft.errors import ConfigError
from undercroft.plan.advice import Advice, net_a_month, unfit
from undercroft.plan.study import Levels, Study
from undercroft.plan.terms import BUDGET_SHARE, Drive, Prices
from undercroft.settings import format_bytes

__all__ = ["FORMATS", "SHOWN", "Told", "check_installed", "draw"]


FORMATS = ("png", "svg")
SHOWN: Mapping[str, str] = {
    "hits": "Curves: which share of the prompt tokens is found, by the size of one level, for each "
    "policy and for the optimum; the advised sizes are marked",
    "levels": "A grid: which share of the prompt tokens is found, for each size of host memory and "
    "of a disk",
    "writes": "Bars: what a disk of each size is written a day, and what it is rated for",
    "money": "A grid: what is saved a month beyond the cost, for each size of host memory and of a "
    "disk",
}
"""What each picture shows, in words; its numbers are in the tables."""

_INK, _MUTED, _FAINT, _PAPER = "#1f2933", "#6b7785", "#e4e7eb", "#ffffff"
_HOST, _DISK, _BEST, _REST = "#0072b2", "#c95a00", "#009e73", "#9aa5b1"
"""After Okabe and Ito: told apart by those who see fewer colours; dashes and widths differ, too."""
_OTHERS = (("#a64d8c", "--"), ("#56a3d4", "-."), ("#7a7a7a", ":"), ("#8c6d00", (0, (1, 1))))
_WORN = "#f3dcc6"
_UNFIT_HATCH = "////"
_TIB = float(1 << 40)
_MOST_LEVEL_TICKS = 12
_NUM_COLOURS = 128
_STYLE: Mapping[str, Any] = {
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": "#cbd2d9",
    "axes.labelcolor": _MUTED,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlepad": 26,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "grid.color": _FAINT,
    "grid.linewidth": 0.8,
    "figure.facecolor": _PAPER,
    "savefig.facecolor": _PAPER,
    "svg.fonttype": "path",
    "svg.hashsalt": "undercroft",
}


@dataclass(frozen=True, slots=True)
class Told:
    """What pictures are of.

    Args:
        study: The numbers.
        advice: What is recommended.
        drive: What a disk can do.
        prices: What things cost, if that is.
        model: What it is called.
    """

    study: Study
    advice: Advice
    drive: Drive
    prices: Prices
    model: str


def check_installed() -> None:
    """Whether pictures can be drawn.

    Raises:
        ConfigError: matplotlib is missing; the message says how to install it.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "pictures are drawn by matplotlib, which is not installed: pip install "
            "'undercroft[plan]', or leave --out out"
        )


def draw(told: Told, folder: Path) -> dict[str, list[Path]]:
    """Draw all pictures into `folder`, in each of `FORMATS`.

    Returns:
        Their files by name, in the order in which they are to be looked at.

    Raises:
        OSError: A file cannot be written.

    Cost: a second or two.
    """
    import matplotlib as mpl  # noqa: PLC0415 - optional, and slow

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - as above

    drawn: dict[str, Callable[[Any, Told], None]] = {"hits": _hits}
    if any(told.study.disks):
        drawn["levels"] = _levels
        drawn["writes"] = _writes
    if told.prices.are_complete:
        drawn["money"] = _money
    files: dict[str, list[Path]] = {}
    with mpl.rc_context(dict(_STYLE)):
        for name, picture in drawn.items():
            figure, axes = plt.subplots(figsize=(9.6, 5.4), dpi=150)
            try:
                picture(axes, told)
                figure.tight_layout()
                files[name] = [folder / f"{name}.{format_}" for format_ in FORMATS]
                for file in files[name]:
                    _save(figure, file)
            finally:
                plt.close(figure)
    return files


def _save(figure: Any, file: Path) -> None:  # noqa: ANN401 - matplotlib's
    """Without a date: the same study gives the same bytes. A palette: PNGs a third as large."""
    if file.suffix == ".svg":
        figure.savefig(file, metadata={"Date": None})
        return
    from PIL import Image  # noqa: PLC0415 - comes with matplotlib

    drawn = BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    with Image.open(drawn) as picture:
        colours = picture.convert("RGB").quantize(_NUM_COLOURS, dither=Image.Dither.NONE)
        colours.save(file, optimize=True)


def _subtitle(axes: Any, text: str) -> None:  # noqa: ANN401 - matplotlib's
    axes.annotate(
        text, (0, 1), xytext=(0, 8), xycoords="axes fraction", textcoords="offset points",
        color=_MUTED, fontsize=9.5, va="bottom",
    )  # fmt: skip


def _sizes_below(axes: Any, sizes: Sequence[int]) -> None:  # noqa: ANN401 - as above
    """Sizes on a logarithmic axis, each doubling as wide as the next."""
    axes.set_xticks([log2(size) for size in sizes], [format_bytes(size) for size in sizes])
    if len(sizes) > _MOST_LEVEL_TICKS:
        for label in axes.get_xticklabels():
            label.set(rotation=35, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", length=0)


# --- what is found, by size -------------------------------------------------------------------


def _hits(axes: Any, told: Told) -> None:  # noqa: ANN401 - as above
    study, chosen = told.study, told.study.policies[0]
    limit = 100 * study.limit.token_hit_ratio
    sizes = chosen.sizes
    at = [log2(size) for size in sizes]
    ours = [100 * chosen.ratio(size) for size in sizes]
    best = [100 * max(study.optimum.ratio(size), chosen.ratio(size)) for size in sizes]
    axes.axhline(limit, color=_REST, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.annotate(
        f"all of it kept, {format_bytes(int(study.all_bytes))}: {limit:.0f} %",
        (at[0], limit), xytext=(0, 5), textcoords="offset points", color=_MUTED, fontsize=9,
        bbox={"facecolor": _PAPER, "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip
    axes.fill_between(at, ours, best, color=_BEST, alpha=0.10, linewidth=0)
    dot = "D" if len(sizes) == 1 else ""  # a line of one point shows nothing
    future = "optimum, which knows the future"
    axes.plot(at, best, color=_BEST, linewidth=1.6, marker=dot, label=future)
    for (colour, dashes), curve in zip(_OTHERS, study.policies[1:], strict=False):
        ratios = [100 * curve.ratio(size) for size in sizes]
        line = {"color": colour, "linestyle": dashes, "linewidth": 1.6, "marker": dot}
        axes.plot(at, ratios, label=curve.policy, **line)
    axes.plot(at, ours, color=_HOST, linewidth=2.6, marker="o", markersize=4.5, label=chosen.policy)
    axes.set_ylim(0, max(limit * 1.12, 5))
    _mark_advice(axes, told)
    _sizes_below(axes, sizes)
    axes.set_xlabel("size of host memory, or of a disk")
    axes.set_ylabel("prompt tokens found, %")
    axes.grid(axis="y")
    axes.set_title("How much of the prompts is found again")
    _subtitle(axes, f"{study.trace.name}; {told.model}")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=6, frameon=False, fontsize=9.5
    )


def _mark_advice(axes: Any, told: Told) -> None:  # noqa: ANN401 - as above
    """A line for each level, its words at the foot: host memory's to the left, the disk's right."""
    levels, chosen = told.advice.levels, told.study.policies[0]
    marks = [("host memory", _HOST, levels.host_bytes)]
    if levels.disk_bytes > levels.host_bytes:
        marks.append(("disk", _DISK, levels.disk_bytes))
    for name, colour, size in marks:
        place, ratio = log2(size), 100 * chosen.ratio(size)
        axes.plot([place, place], [0, ratio], color=colour, linewidth=1.4, alpha=0.8)
        axes.plot([place], [ratio], marker="o", markersize=10, color=colour)
        has_room = size not in chosen.sizes[:2] if name == "host memory" else False
        is_left = has_room or size == chosen.sizes[-1]
        axes.annotate(
            f"{name}\n{format_bytes(size)}\n{ratio:.0f} %",
            (place, 0),
            xytext=(-7 if is_left else 7, 6),
            textcoords="offset points",
            color=colour,
            fontsize=10,
            fontweight="bold",
            ha="right" if is_left else "left",
            va="bottom",
            linespacing=1.4,
        )


# --- two levels -------------------------------------------------------------------------------


def _grid(
    axes: Any,  # noqa: ANN401 - as above
    told: Told,
    value: Callable[[Levels], float],
    text: Callable[[Levels], str],
    colours: str,
) -> None:
    """A cell for each pair of sizes; the advised one is framed."""
    study = told.study
    cells = [[study.levels(host, disk) for disk in study.disks] for host in study.hosts]
    values = [[value(levels) for levels in row] for row in cells]
    lowest, highest = min(map(min, values)), max(map(max, values))
    spread = max(highest - lowest, 1e-9)
    axes.imshow(
        values, cmap=colours, aspect="auto", origin="lower",
        vmin=lowest - 0.25 * spread, vmax=highest + 0.15 * spread,
    )  # fmt: skip
    for y, row in enumerate(cells):
        for x, levels in enumerate(row):
            is_dark = (value(levels) - lowest) / spread > 0.62  # noqa: PLR2004 - by eye
            head, _, rest = text(levels).partition("\n")
            colour, up = _PAPER if is_dark else _INK, 0.13 if rest else 0.0
            axes.text(
                x, y + up, head, ha="center", va="center", color=colour, fontsize=11,
                fontweight="bold",
            )  # fmt: skip
            axes.text(x, y - 0.2, rest, ha="center", va="center", color=colour, fontsize=8.5)
            if unfit(levels, told.drive):
                axes.add_patch(_hatched(x, y, colour))
            if levels == told.advice.levels:
                axes.add_patch(_frame(x, y))
    for place in range(1, len(study.disks)):
        axes.axvline(place - 0.5, color=_PAPER, linewidth=1.5)
    for place in range(1, len(study.hosts)):
        axes.axhline(place - 0.5, color=_PAPER, linewidth=1.5)
    axes.set_xticks(
        range(len(study.disks)), [format_bytes(d) if d else "no disk" for d in study.disks]
    )
    axes.set_yticks(range(len(study.hosts)), [format_bytes(host) for host in study.hosts])
    axes.set_xlabel("size of the disk")
    axes.set_ylabel("size of host memory")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _frame(x: int, y: int) -> Any:  # noqa: ANN401 - as above
    from matplotlib.patches import Rectangle  # noqa: PLC0415 - optional, and slow

    return Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, fill=False, edgecolor=_DISK, linewidth=3)


def _hatched(x: int, y: int, colour: str) -> Any:  # noqa: ANN401 - as above
    """In the corner of a cell: its disk would not last, or not keep up."""
    from matplotlib.patches import Polygon  # noqa: PLC0415 - optional, and slow

    corner = [(x + 0.5, y - 0.5), (x + 0.5, y - 0.05), (x + 0.28, y - 0.5)]
    return Polygon(corner, fill=False, hatch=_UNFIT_HATCH, edgecolor=colour, linewidth=0)


def _key(told: Told) -> str:
    """What frame and hatching mean."""
    study = told.study
    every = [study.levels(host, disk) for host in study.hosts for disk in study.disks]
    hatched = "; hatched: disk too slow or worn out"
    return "framed: the advice" + (hatched if any(unfit(e, told.drive) for e in every) else "")


def _levels(axes: Any, told: Told) -> None:  # noqa: ANN401 - as above
    _grid(axes, told, lambda levels: levels.ratio, _ratio_text, "YlGnBu")
    axes.set_title("Two levels: how much is found, and where")
    _subtitle(axes, f"prompt tokens found (from host memory + from disk); {_key(told)}")


def _ratio_text(levels: Levels) -> str:
    host, disk = 100 * levels.host_ratio, 100 * levels.disk_ratio
    return f"{100 * levels.ratio:.0f} %\n{host:.0f} + {disk:.0f}"


def _money(axes: Any, told: Told) -> None:  # noqa: ANN401 - as above
    _grid(
        axes,
        told,
        lambda levels: net_a_month(levels, told.prices),
        lambda levels: f"{net_a_month(levels, told.prices):,.0f}",
        "YlGn",
    )
    axes.set_title("What it is worth a month")
    _subtitle(axes, f"engine time saved, less the cost, in the money of --prices; {_key(told)}")


# --- writes -----------------------------------------------------------------------------------


def _writes(axes: Any, told: Told) -> None:  # noqa: ANN401 - as above
    study, host = told.study, told.advice.levels.host_bytes
    disks = [size for size in study.disks if size]
    written = [study.levels(host, size).written_bytes / _TIB for size in disks]
    places = range(len(disks))
    endurance = told.drive.endurance
    rated = [endurance.bytes_a_day(size) / _TIB for size in disks] if endurance else []
    bars = axes.bar(places, written, width=0.56, color=_DISK, edgecolor=_PAPER, linewidth=0)
    for bar, amount, most in zip(bars, written, rated, strict=False):
        if amount > BUDGET_SHARE * most:
            bar.set(hatch="//", facecolor=_WORN, edgecolor=_DISK)
    for place, amount in zip(places, written, strict=True):
        text = f"{amount:,.2f} TiB" if amount < 10 else f"{amount:,.0f} TiB"  # noqa: PLR2004 - digits
        # In the middle of its bar, or above that where a line runs through it.
        is_taken = bool(rated) and abs(rated[place] - amount / 2) < 0.08 * max(written)
        axes.text(
            place, amount * (0.75 if is_taken else 0.5), text, ha="center", va="center",
            fontsize=11, color=_INK, fontweight="bold",
            bbox={"facecolor": _PAPER, "edgecolor": "none", "boxstyle": "round,pad=0.25"},
        )  # fmt: skip
    shown = max(written)
    for place, most in zip(places, rated, strict=False):
        if most <= 1.6 * shown:
            axes.plot([place - 0.38, place + 0.38], [most, most], color=_INK, linewidth=2)
            shown = max(shown, most)
    axes.set_ylim(0, 1.1 * shown)
    names = [format_bytes(size) for size in disks]
    if rated:
        wear = [amount / most for amount, most in zip(written, rated, strict=True)]
        names = [f"{name}\n{each:.1f}x rated" for name, each in zip(names, wear, strict=True)]
    axes.set_xlim(-0.8, len(disks) - 0.2)
    axes.set_xticks(places, names, linespacing=1.5)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("written a day, TiB")
    axes.grid(axis="y")
    axes.set_xlabel("size of the disk")
    axes.set_title("What the disk is written a day")
    rating = f"; black: its rating, {endurance.text}; hatched: too much" if endurance else ""
    _subtitle(axes, f"each chunk once, and again if it was evicted and came back{rating}")

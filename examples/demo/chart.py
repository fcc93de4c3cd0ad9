"""The demo's chart: time to first token, one bar per place the KV cache came from."""

from collections.abc import Sequence
from pathlib import Path

INK = "#1f2933"
MUTED = "#7b8794"
COLD = "#b8c0cc"
WARM = "#2f6f8f"
RESTART = "#0b9e78"


def draw(rows: Sequence[tuple[str, str, float]], *, title: str, note: str, target: Path) -> None:
    """Draw horizontal bars into a PNG.

    Args:
        rows: (label, second line of the label, seconds), the cold run first.
        title: What the chart shows, in one line.
        note: Where it was measured.
        target: The PNG to write.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cold_s = rows[0][2]
    figure, axes = plt.subplots(figsize=(9.2, 1.2 + 0.82 * len(rows)), dpi=160)
    colours = [COLD] + [WARM] * (len(rows) - 2) + [RESTART]
    places = range(len(rows))
    axes.barh(places, [row[2] for row in rows], height=0.56, color=colours)
    for place, (_, _, seconds) in zip(places, rows, strict=True):
        amount = f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
        ratio = "" if place == 0 else f"    {seconds / cold_s:.3f}x of cold"
        axes.annotate(
            amount + ratio,
            (seconds, place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=11,
            fontweight="bold" if place == len(rows) - 1 else "normal",
        )
    axes.set_yticks(places, [f"{row[0]}\n{row[1]}" for row in rows], fontsize=10, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max(cold_s * 1.14, max(row[2] for row in rows[1:]) * 1.4))
    axes.set_xlabel("time to first token, seconds", color=MUTED, fontsize=10)
    axes.set_title(title, loc="left", fontsize=13, color=INK, fontweight="bold", pad=14)
    axes.tick_params(axis="x", colors=MUTED, labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cbd2d9")
    figure.text(0.012, 0.015, note, fontsize=8, color=MUTED)
    figure.tight_layout(rect=(0, 0.035, 1, 1))
    figure.savefig(target)
    plt.close(figure)

"""A study as one HTML page that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

__all__ = ["Page", "write_page"]

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.55 system-ui, sans-serif; color: #1f2933; background: #f5f7f9; margin: 0; }}
main {{ max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }}
h1 {{ font-size: 1.7rem; margin: 0 0 .3rem; }}
p.under {{ color: #6b7785; margin: 0 0 1.6rem; }}
figure, section {{ background: #fff; border-radius: 10px; margin: 0 0 1.4rem;
  padding: 1.1rem 1.3rem; box-shadow: 0 1px 3px rgba(31, 41, 51, .08); overflow-x: auto; }}
figure svg {{ width: 100%; height: auto; display: block; }}
h2 {{ font-size: 1.1rem; margin: 0 0 .6rem; }}
pre {{ background: #1f2933; color: #f5f7f9; border-radius: 8px; padding: .9rem 1.1rem; margin: 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .9rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }}
th, td {{ text-align: right; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #e4e7eb; }}
th {{ color: #6b7785; font-weight: 600; }}
ul {{ margin: 0; padding-left: 1.2rem; color: #3e4c59; }}
</style></head><body><main>
"""
_SVG = re.compile(r"<svg.*</svg>", re.DOTALL)
_IDS = re.compile(r'(\bid="|xlink:href="#|url\(#)')


@dataclass(frozen=True, slots=True)
class Page:
    """What is on the page.

    Args:
        title: What it is about.
        under: A line below the title.
        advice: Lines about what is recommended.
        command: What does it.
        pictures: SVG files by name, each with what it shows, for those who do not see it; they are
            put into the page.
        tables: Heading, titles of columns, rows.
        notes: What was assumed and left out.
    """

    title: str
    under: str
    advice: Sequence[str]
    command: str
    pictures: Mapping[str, tuple[Path, str]]
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]
    notes: Sequence[str]


def write_page(page: Page, file: Path) -> None:
    """Write the page.

    Raises:
        OSError: It cannot be written, or a picture not be read.
    """
    parts = [_HEAD.format(title=escape(page.title))]
    parts.append(f'<h1>{escape(page.title)}</h1><p class="under">{escape(page.under)}</p>\n')
    lines = "".join(f"<li>{escape(line)}</li>" for line in page.advice)
    parts.append(f"<section><h2>Recommended</h2><ul>{lines}</ul><br>")
    parts.append(f"<pre>{escape(page.command)}</pre></section>\n")
    parts += [
        f'<figure role="img" aria-label="{escape(shown)}">{_inline(svg, name)}</figure>\n'
        for name, (svg, shown) in page.pictures.items()
    ]
    for heading, titles, rows in page.tables:
        parts.append(f"<section><h2>{escape(heading)}</h2><table><tr>")
        parts += [f'<th scope="col">{escape(each)}</th>' for each in titles]
        parts.append("</tr>")
        for row in rows:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</table></section>\n")
    noted = "".join(f"<li>{escape(note)}</li>" for note in page.notes)
    parts.append(f"<section><h2>What was assumed</h2><ul>{noted}</ul></section>\n")
    parts.append("</main></body></html>\n")
    file.write_text("".join(parts), encoding="utf-8")


def _inline(svg: Path, name: str) -> str:
    """The picture itself, its ids its own on a page with others."""
    found = _SVG.search(svg.read_text(encoding="utf-8"))
    return _IDS.sub(rf"\g<1>{name}-", found[0]) if found else ""

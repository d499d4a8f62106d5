"""The HTML page around tables and curves: one file, without scripts, that fetches nothing.

The content-security policy in its head makes the browser enforce this, whatever someone later puts into the body. The
style sheet serves wide and narrow screens, light and dark mode, and print.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from evaluation.report.curves import DARK, LIGHT

NONE = "\N{EN DASH}"  # a value that was not measured


def page(title: str, sections: Iterable[str]) -> str:
    """Return the whole document. `sections` are HTML; empty ones are left out."""
    return _PAGE.format(title=escape(title), style=_style(), body="\n".join(filter(None, sections)))


def table(caption: str, head: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]], note: str = "") -> str:
    """Return a table of text cells and escape each cell. `groups` maps a group's heading ("" for none) to its rows.

    The first cell of a row is its header. Columns of words are aligned left, columns of numbers right.
    """
    rows = [row for group in groups.values() for row in group]
    words = [any(letter.isalpha() for row in rows for letter in row[column]) for column in range(len(head))]
    kinds = [' class="words"' if column_of_words else "" for column_of_words in words]
    cells = "".join(f'<th scope="col"{kind}>{escape(cell)}</th>' for kind, cell in zip(kinds, head, strict=True))
    bodies = []
    for heading, group in groups.items():
        above = f'<tr><th class="group" scope="rowgroup" colspan="{len(head)}">{escape(heading)}</th></tr>'
        bodies.append(f"<tbody>{above if heading else ''}{''.join(_row(row, kinds) for row in group)}</tbody>")
    below = f"<p>{escape(note)}</p>" if note else ""
    # The table takes the focus, so that a keyboard can scroll a wide table on a narrow screen.
    return (
        f'<h3>{escape(caption)}</h3><div class="table" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{cells}</tr></thead>{''.join(bodies)}</table></div>{below}"
    )


def _row(row: Sequence[str], kinds: Sequence[str]) -> str:
    cells = (f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], row[1:], strict=True))
    return f'<tr><th scope="row">{escape(row[0])}</th>{"".join(cells)}</tr>'


def _style() -> str:
    def palette(colours: Sequence[str]) -> str:
        return " ".join(f"--run-{index}: {colour};" for index, colour in enumerate(colours))

    return _CSS.replace("/*light*/", palette(LIGHT)).replace("/*dark*/", palette(DARK))


_CSS = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1d21; --soft: #565b64; --faint: #b9bec7; --wash: #f3f5f8;
  /*light*/ }
@media (prefers-color-scheme: dark) { :root { --paper: #15171b; --ink: #e8eaee; --soft: #a6adb8; --faint: #4d535e;
  --wash: #1f2228; /*dark*/ } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 80rem; padding: 1rem clamp(0.75rem, 3vw, 2.5rem) 3rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; margin: 2rem 0 0.5rem; }
h3 { font-size: 1.05rem; margin: 1rem 0 0.25rem; }
figure h3 { margin-top: 0; }
p, li, figcaption { max-width: 46rem; }
.lead { font-size: 1.1rem; }
.remarks { background: var(--wash); border-left: 4px solid var(--run-1); padding: 0.5rem 1rem; }
.remarks h2 { margin: 0; font-size: 1.05rem; }
.remarks ul { margin: 0.25rem 0; padding-left: 1.1rem; }
.table { overflow-x: auto; margin: 0.25rem 0 0.75rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.95rem; }
th, td { padding: 0.25rem 0.75rem; text-align: right; vertical-align: top; overflow-wrap: normal; }
th:first-child, .group { text-align: left; padding-left: 0; }
.words { text-align: left; white-space: nowrap; }
tbody th { font-weight: 400; min-width: 8rem; max-width: 22rem; overflow-wrap: anywhere; }
thead th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
tbody .group { text-align: left; font-weight: 600; max-width: none; }
tbody { border-top: 1px solid var(--faint); }
@media (max-width: 40rem) { table { font-size: 0.85rem; } th, td { padding: 0.2rem 0.4rem; }
  tbody th { min-width: 6.5rem; } }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 2rem 2.5rem; }
figure { margin: 0; min-width: 0; }
figcaption { color: var(--soft); font-size: 0.95rem; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0; padding: 0; font-size: 0.9rem; }
.swatch { width: 30px; height: 8px; margin-right: 0.4rem; }
.swatch path { stroke-width: 2.5; }
.plot { display: block; width: 100%; height: auto; }
.plot * { stroke-linejoin: round; stroke-linecap: butt; }
.plot text { font-family: system-ui, sans-serif !important; }
.tooltips circle { fill: transparent; pointer-events: all; }
.tooltips circle:hover { stroke: var(--ink); }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""

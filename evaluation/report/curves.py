"""Curves over the tokens of a run, as inline SVG that follows the page's colours.

matplotlib draws lines, axes and ticks. We add everything that carries a user's text (names in tooltips, the alternative
text) afterwards, escaped, because matplotlib reads `$` in a name as mathematics. The legend is HTML for the same reason,
and because it must wrap on a narrow screen.

Two channels tell curves apart: colour and marker name the run, the line style names the objective. The colours below are
placeholders that become CSS variables, so that one drawing is readable in light and in dark mode. The light values come
from Okabe and Ito's palette for colour-blind readers; those that were too pale on white are darkened.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Transform

from evaluation.report.run_folders import Run

LIGHT = ("#0072b2", "#c44f00", "#00795c", "#a8527f", "#7d6200", "#3f4a9c")
DARK = ("#5bb5ec", "#ff9450", "#3ccf9f", "#e79bc4", "#e6d34f", "#a9b1ff")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# (offset, lengths of dash and gap in line widths), in matplotlib's form; None: solid
_DASHES: dict[str, tuple[int, tuple[float, ...] | None]] = {"clm": (0, None), "mlm": (0, (4, 1.5))}
_OTHER_DASHES = (0, (1, 1.5))

_INK, _FAINT = "#0a0b0c", "#0a0b0d"
_RUN_COLOURS = [f"#0c0d{index:02x}" for index in range(len(LIGHT))]

# Small on purpose: on 400 px of screen a point is 0.9 px, so labels of 11 points stay readable.
_WIDTH, _HEIGHT = 403, 240  # points; one point is one unit of the view box
_STYLE = {
    "figure.dpi": 72,
    "font.size": 11,
    "svg.fonttype": "none",
    "svg.hashsalt": "clm-detour",  # matplotlib's ids are random without it; the same runs must give the same bytes
    "axes.edgecolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}

DRAWN_POINTS = 800  # of one phase of one curve: twice the width in points
_TOOLTIPS = 60  # of one phase of one curve; more would overlap


@dataclass(frozen=True)
class Curve:
    """One quantity over one phase of a run. `tokens` count from the start of the run; a value of nan leaves a gap."""

    run: int  # position among the runs; it decides colour and marker
    run_name: str
    phase_name: str
    objective: str
    tokens: list[int]
    values: list[float]

    @property
    def thinned(self) -> bool:
        return len(self.tokens) > DRAWN_POINTS


@dataclass(frozen=True)
class Plot:
    key: str  # prefix of the SVG's ids, unique on the page
    title: str
    quantity: str  # what a value is, for the tooltips, such as "MLM loss"
    curves: list[Curve]
    end: int  # tokens at which the axis ends; the same on all plots of a page
    boundaries: list[tuple[int, int]]  # (number of a phase from 2, tokens at its start), of all runs
    sparse: bool = False  # the curves have few points, and each point gets a marker
    log: bool = False  # the axis of values is logarithmic
    overlapping: bool = False  # the curves will coincide, and earlier ones are drawn broader
    zero: bool = False  # the axis of values begins at 0


def short_tokens(tokens: float, _position: object = None) -> str:
    """Write a number of tokens briefly: 1_500_000 -> "1.5 M"."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(tokens) >= size:
            return f"{tokens / size:.4g} {unit}"
    return f"{tokens:.4g}"


def _short_value(value: float, _position: object = None) -> str:
    """Write a tick label in Python's form; matplotlib's is mathematics, drawn as several shifted pieces of text."""
    if value and not 0.001 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def last_token(runs: Sequence[Run]) -> int:
    return max(phase.offset + phase.trained for run in runs for phase in run.phases)


def phase_boundaries(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Return where the started phases begin, without those that would coincide on the screen (within 1 % of the axis)."""
    end = last_token(runs)
    found: list[tuple[int, int]] = []
    for run in runs:
        for number, phase in enumerate(run.phases[1:], start=2):
            near = any(number == other and abs(phase.offset - at) <= 0.01 * end for other, at in found)
            if phase.started and not near:
                found.append((number, phase.offset))
    return found


def legend(plot: Plot) -> str:
    """Return the legend as an HTML list, with one entry for each run and objective that has a curve."""
    entries = []
    for run, run_name, objective in dict.fromkeys((c.run, c.run_name, c.objective) for c in plot.curves):
        dashes = " ".join(f"{2.2 * length:g}" for length in _DASHES.get(objective, _OTHER_DASHES)[1] or ())
        swatch = (
            f'<svg class="swatch" viewBox="0 0 30 8" aria-hidden="true"><path d="M0 4H30" '
            f'style="stroke: var(--run-{run % len(LIGHT)}); stroke-dasharray: {dashes or "none"}"/></svg>'
        )
        entries.append(f"<li>{swatch}{escape(run_name)}, {escape(objective.upper())} phase</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>'


def draw(plot: Plot) -> str:
    """Return the plot as an `<svg>` element with a title, a description and tooltips."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's own matplotlibrc must not change the page
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(_WIDTH / 72, _HEIGHT / 72))
        # The margins are fixed because the tooltips need the final transformation before the drawing.
        axes = figure.add_axes((0.125, 0.165, 0.855, 0.76))
        runs = max((curve.run for curve in plot.curves), default=0) + 1
        for position, curve in enumerate(plot.curves):
            broader = 1.3 * (runs - 1 - curve.run) if plot.overlapping else 0.0
            tokens, values = _thin(curve)
            axes.plot(
                tokens,
                values,
                gid=f"curve-{position}",
                color=_RUN_COLOURS[curve.run % len(_RUN_COLOURS)],
                linestyle=_DASHES.get(curve.objective, _OTHER_DASHES),
                linewidth=1.3 + min(broader, 4.0),
                marker=_MARKERS[curve.run % len(_MARKERS)] if plot.sparse or len(tokens) == 1 else None,
                markersize=4.5,
                zorder=2 + position / len(plot.curves),
            )
        if plot.log:
            axes.set_yscale("log", nonpositive="mask")
            # Most norms span less than a decade, so 1, 2 and 5 of each decade get a label.
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(_short_value))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(short_tokens))
        axes.tick_params(length=3)
        axes.set_xlabel("tokens trained")
        for number, at in plot.boundaries:
            axes.axvline(at, color=_INK, linewidth=0.8, linestyle=(0, (1, 2)), gid=f"boundary-{number}-{at}")
            axes.text(at, 1.02, f"phase {number}", transform=axes.get_xaxis_transform(), ha="center", fontsize=10)
        axes.set_xlim(-0.02 * (plot.end or 1), 1.02 * (plot.end or 1))
        if plot.zero:
            axes.set_ylim(bottom=0)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        to_screen = axes.transData
        tooltips = "".join(_tooltips(plot, curve, to_screen) for curve in plot.curves)
    return _inline(buffer.getvalue(), plot, tooltips)


def _thin(curve: Curve) -> tuple[list[int], list[float]]:
    """Keep about DRAWN_POINTS real points: the lowest and the highest of each group of neighbours, in their order.

    A spike stays visible; an average would hide it.
    """
    if not curve.thinned:
        return curve.tokens, curve.values
    size = -(-2 * len(curve.tokens) // DRAWN_POINTS)
    kept: list[int] = []
    for begin in range(0, len(curve.tokens), size):
        group = range(begin, min(begin + size, len(curve.tokens)))
        finite = [index for index in group if not math.isnan(curve.values[index])]
        pair = (
            {min(finite, key=curve.values.__getitem__), max(finite, key=curve.values.__getitem__)}
            if finite
            else {begin}
        )
        kept += sorted(pair)
    return [curve.tokens[index] for index in kept], [curve.values[index] for index in kept]


def _tooltips(plot: Plot, curve: Curve, to_screen: Transform) -> str:
    """Return invisible circles over the curve's points. A browser shows a circle's `<title>` when the pointer rests on it."""
    stride = max(1, -(-len(curve.tokens) // _TOOLTIPS))
    circles = []
    for tokens, value in list(zip(curve.tokens, curve.values, strict=True))[::stride]:
        if math.isnan(value) or (plot.log and value <= 0):
            continue
        x, y = to_screen.transform((tokens, value))
        words = f"{curve.run_name}, {curve.phase_name}: {plot.quantity} {value:.5g} at {tokens:,} tokens"
        circles.append(f'<circle cx="{x:.1f}" cy="{_HEIGHT - y:.1f}" r="5"><title>{escape(words)}</title></circle>')
    return f'<g class="tooltips">{"".join(circles)}</g>'


def _inline(svg: str, plot: Plot, tooltips: str) -> str:
    """Make a stand-alone SVG file into a part of the page."""
    drawing = svg[svg.index("<svg") :]
    body = drawing[drawing.index(">") + 1 : drawing.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # Inside a page this style sheet would apply to the whole page, which has its own rules.
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")  # needs no namespace declaration
    # Several drawings share one page, so their ids must differ.
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{plot.key}-", body)
    body = body.replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
    for index, colour in enumerate(_RUN_COLOURS):
        body = body.replace(colour, f"var(--run-{index})")
    return (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-labelledby="{plot.key}-title {plot.key}-description">'
        f'<title id="{plot.key}-title">{escape(plot.title)}</title>'
        f'<desc id="{plot.key}-description">{escape(_description(plot))}</desc>{body}{tooltips}</svg>'
    )


def _description(plot: Plot) -> str:
    """Describe the drawing in words, for readers who do not see it."""
    sentences = []
    for curve in plot.curves:
        finite = [value for value in curve.values if not math.isnan(value)]
        course = f"from {finite[0]:.5g} to {finite[-1]:.5g}" if finite else "no finite value"
        span = f"{short_tokens(curve.tokens[0])} to {short_tokens(curve.tokens[-1])} tokens"
        sentences.append(f"{curve.run_name}, {curve.phase_name} ({curve.objective.upper()}), {span}: {course}.")
    return " ".join(sentences)

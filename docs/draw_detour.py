"""Draw docs/detour.svg, the picture at the top of the README: documents, packed rows, CLM, MLM decay, encoder.

    python docs/draw_detour.py [FILE.svg]        standard library only; the same bytes each time

The two matrices are the attention masks over one packed row of three documents: row i shows which tokens token i sees.
Strong colour marks the tokens that the loss counts. Under CLM each token predicts the next one, so the last token of a
document has no loss. Under MLM only the masked tokens have one.

The picture has a background of its own, so that it is readable on any page; a dark scheme swaps the colours.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

LENGTHS = (5, 4, 3)  # tokens of the three documents of the row
MASKED = (2, 7)  # positions of the row that MLM masks
OTHER_ROWS = ((7, 5), (3, 3, 6), (12,), (4, 8), (2, 6, 4))
CELL, GAP = 13, 1  # pixels
SIDE = CELL * sum(LENGTHS)
WIDTH, HEIGHT = 880, 376
TOP = 88  # of the matrices
MIDDLE = TOP + SIDE // 2
RATE_TOP, RATE_BOTTOM = 306, 342
ROWS_X, CLM_X, MLM_X, ENCODER_X = 144, 350, 556, 752  # left edges of the columns

# Colour names: what they are on light and on dark paper. Plain values, since not every viewer knows CSS variables.
COLOURS = {
    "paper": ("#ffffff", "#15171b"),
    "edge": ("#d5d9e0", "#363b44"),
    "ink": ("#1b1d21", "#e8eaee"),
    "soft": ("#565b64", "#a6adb8"),
    "empty": ("#eef0f4", "#22262d"),
    "other": ("#c3c8d1", "#4d535e"),
    "a": ("#0072b2", "#5bb5ec"),
    "b": ("#c44f00", "#ff9450"),
    "c": ("#00795c", "#3ccf9f"),
    "a-pale": ("#b5d5e8", "#264a61"),
    "b-pale": ("#f0cab2", "#63402a"),
    "c-pale": ("#b2d7ce", "#1e5443"),
}
FONT = "text { font: 12px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif }"
SHAPES = """.title { font-size: 15px; font-weight: 600 }
.mark { font-size: 10px; font-weight: 700; text-anchor: middle }
.middle { text-anchor: middle }
.end { text-anchor: end }
.line, .thin { fill: none }
.line, .sheet { stroke-width: 1.5 }"""

DESCRIPTION = (
    "Three documents are packed end to end into one row. Phase 1, CLM: a block-diagonal lower-triangular mask, each token "
    "sees the earlier tokens of its own document and predicts the next one. Phase 2, MLM decay: a block-diagonal full mask, "
    "each token sees its whole document, masked tokens are predicted, the learning rate falls. The result is an encoder."
)


def document_of(position: int) -> int:
    """Return the number of the document that holds a position of the row."""
    end = 0
    for number, length in enumerate(LENGTHS):
        end += length
        if position < end:
            return number
    raise IndexError(position)


def style() -> str:
    """Return the style sheet: a class of each colour's name that fills, and the classes that draw lines."""

    def rules(scheme: int) -> str:
        of = {name: both[scheme] for name, both in COLOURS.items()}
        filled = "".join(f".{name} {{ fill: {colour} }}\n" for name, colour in of.items())
        sheets = "".join(f".sheet-{name} {{ fill: {of['paper']}; stroke: {of[name]} }}\n" for name in "abc")
        return (
            f"text {{ fill: {of['soft']} }}\n.title, .mark {{ fill: {of['ink']} }}\n{filled}{sheets}"
            f".paper, .thin {{ stroke: {of['edge']} }}\n.masked {{ fill: {of['paper']}; stroke: {of['ink']} }}\n"
            f".line {{ stroke: {of['ink']} }}\n"
        )

    return f"{FONT}\n{rules(0)}{SHAPES}\n@media (prefers-color-scheme: dark) {{\n{rules(1)}}}\n"


def cell(x: float, y: float, kind: str, width: float = CELL - GAP, height: float = CELL - GAP) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="1.5"/>'


def text(x: float, y: float, words: str, kind: str = "soft") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def arrow(x: float) -> str:
    """Return a short arrow to the right at the height of the matrices' middle."""
    return f'<path class="line" d="M{x} {MIDDLE}h18m-6 -5l6 5l-6 5"/>'


def token(x: float, y: float, position: int, masked: bool) -> Iterator[str]:
    """Draw one token of the row, coloured by its document; a masked one is an empty box with a question mark."""
    if masked:
        yield cell(x + 0.5, y + 0.5, "masked", CELL - GAP - 1, CELL - GAP - 1)
        yield text(x + (CELL - GAP) / 2, y + 9.7, "?", "mark")
    else:
        yield cell(x, y, "abc"[document_of(position)])


def documents(x: float) -> Iterator[str]:
    """Draw a sheet of paper for each document, with as many lines as it has tokens."""
    y = float(TOP)
    for number, length in enumerate(LENGTHS):
        name = "abc"[number]
        height = 7 * length + 9
        yield f'<rect class="sheet sheet-{name}" x="{x + 0.5:g}" y="{y + 0.5:g}" width="51" height="{height}" rx="3"/>'
        for line in range(length):
            yield cell(x + 8, y + 7.5 + 7 * line, name, 36 - 12 * (line == length - 1), 3)
        y += height + 15.5


def packed_rows(x: float) -> Iterator[str]:
    """Draw the row of the three documents, and more rows below it that are packed in the same way."""
    for position in range(sum(LENGTHS)):
        yield from token(x + CELL * position, TOP, position, masked=False)
    yield f'<rect class="line" x="{x - 3.5}" y="{TOP - 3.5}" width="{SIDE + 6}" height="{CELL + 6}" rx="3"/>'
    for number, lengths in enumerate(OTHER_ROWS, start=1):
        y, begin = TOP + 10 + number * (CELL + 10), 0
        for length in lengths:
            yield cell(x + CELL * begin, y, "other", CELL * length - 2)
            begin += length


def matrix(x: float, causal: bool) -> Iterator[str]:
    """Draw an attention mask, with the row of tokens above it (what is seen) and at its left (what sees)."""
    size = sum(LENGTHS)
    masked = () if causal else MASKED
    for position in range(size):
        yield from token(x + CELL * position, TOP - CELL - 4, position, position in masked)
        yield from token(x - CELL - 4, TOP + CELL * position, position, position in masked)
    for query in range(size):
        last = query == size - 1 or document_of(query + 1) != document_of(query)
        loss = not last if causal else query in masked
        for key in range(size):
            seen = document_of(key) == document_of(query) and (key <= query or not causal)
            kind = "abc"[document_of(query)] + ("" if loss else "-pale") if seen else "empty"
            yield cell(x + CELL * key, TOP + CELL * query, kind)


def encoder(x: float) -> Iterator[str]:
    """Draw a stack of layers."""
    for layer in range(6):
        yield cell(x, MIDDLE - 62 + 21 * layer, "other", 96, 16)


def learning_rate() -> Iterator[str]:
    """Draw the schedule under the two phases: warm-up, constant, then 1 - sqrt down to a tenth."""
    height = RATE_BOTTOM - RATE_TOP
    points = [(CLM_X, RATE_BOTTOM), (CLM_X + 12, RATE_TOP), (MLM_X, RATE_TOP)]
    for step in range(1, 41):
        share = (step / 40) ** 2  # more points where the curve is steep
        points.append((MLM_X + SIDE * share, RATE_BOTTOM - height * (0.1 + 0.9 * (1 - share**0.5))))
    yield f'<path class="thin" d="M{CLM_X} {RATE_BOTTOM + 0.5}H{MLM_X + SIDE}M{MLM_X + 0.5} {RATE_TOP - 6}V{RATE_BOTTOM}"/>'
    yield f'<path class="line" d="M{"L".join(f"{px:g} {py:.1f}" for px, py in points)}"/>'
    yield text(CLM_X - 14, RATE_BOTTOM - 16, "learning rate", "soft end")
    yield text(CLM_X - 14, RATE_BOTTOM, "(not to scale)", "soft end")
    yield text((CLM_X + MLM_X) / 2, RATE_BOTTOM + 18, "n tokens", "soft middle")
    yield text(MLM_X + SIDE / 2, RATE_BOTTOM + 18, "0.1 n tokens", "soft middle")


def drawing() -> str:
    parts = [
        text(24, 32, "Documents", "title"),
        text(24, 50, "your text"),
        *documents(24),
        arrow(98),
        text(ROWS_X, 32, "Packed rows", "title"),
        text(ROWS_X, 50, "no padding, no truncation"),
        *packed_rows(ROWS_X),
        arrow(ROWS_X + SIDE + 8),
        text(CLM_X - 17, 32, "1. CLM", "title"),
        text(CLM_X - 17, 50, "causal mask, next token"),
        *matrix(CLM_X, causal=True),
        text(CLM_X, TOP + SIDE + 20, "Each token predicts"),
        text(CLM_X, TOP + SIDE + 36, "the next one."),
        arrow(CLM_X + SIDE + 7),
        text(MLM_X - 17, 32, "2. MLM decay", "title"),
        text(MLM_X - 17, 50, "full mask, 15 % hidden"),
        *matrix(MLM_X, causal=False),
        text(MLM_X, TOP + SIDE + 20, "Masked tokens (?) are"),
        text(MLM_X, TOP + SIDE + 36, "predicted from both sides."),
        arrow(MLM_X + SIDE + 8),
        text(ENCODER_X, 32, "Encoder", "title"),
        text(ENCODER_X, 50, "of your domain"),
        *encoder(ENCODER_X),
        text(ENCODER_X, TOP + SIDE + 20, "A Hugging Face"),
        text(ENCODER_X, TOP + SIDE + 36, "folder."),
        text(24, TOP + SIDE + 20, "A row of a matrix is what one token sees."),
        text(24, TOP + SIDE + 36, "Strong colour: its prediction has a loss."),
        text(24, TOP + SIDE + 52, "Phase 1 begins with a pretrained encoder."),
        *learning_rate(),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'role="img" aria-labelledby="title description">',
            '<title id="title">The CLM detour</title>',
            f'<desc id="description">{DESCRIPTION}</desc>',
            f"<style>\n{style()}</style>",
            f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("detour.svg")
    file.write_text(drawing(), encoding="utf-8", newline="\n")

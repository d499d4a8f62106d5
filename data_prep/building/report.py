"""What a build has made, and the summary that it prints."""

from dataclasses import dataclass

from data_prep.rows import Manifest


@dataclass(frozen=True)
class BuildReport:
    manifests: list[Manifest]  # none after a part of a build
    dropped: dict[str, int]  # reason -> records
    left_out: int  # files of unknown kind in folders
    edges: int  # number of special tokens that a document gets
    seconds: float
    note: str = ""


def build_summary(report: BuildReport, out: str) -> str:
    """Documents, tokens, rows, fill, drops and speed of a build."""
    lines = [report.note] if report.note else []
    for manifest in report.manifests:
        counts = manifest.counts
        cut = f" ({counts.pieces - counts.documents:,} cuts)" if counts.pieces > counts.documents else ""
        lines.append(
            f"{manifest.split or 'rows'}: {counts.documents:,} documents{cut}, {counts.tokens:,} tokens, {counts.rows:,} rows"
            f" of {manifest.row_length:,}, fill {manifest.fill:.2%}"
        )
    if report.manifests:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in report.dropped.items())
        lines.append(f"dropped: {dropped or 'none'}")
    if report.left_out:
        lines.append(f"left out: {report.left_out:,} files of other kinds")
    if not report.edges:
        lines.append("note: this tokenizer's own rule adds no special tokens to a document, so the rows hold none")
    tokens = sum(manifest.counts.tokens for manifest in report.manifests)
    if report.seconds:
        speed = f", {tokens / report.seconds:,.0f} tokens/s, in {out}" if tokens else ""
        lines.append(f"{report.seconds:.1f} s{speed}")
    return "\n".join(lines)

"""One self-contained HTML page that compares runs, such as a detour and its matched MLM twin.

The page must be safe to mail and to publish: it holds no script and no external part (its content-security policy
forbids both), and no path, host, user or date. We escape everything that comes from a recipe. The same run folders give
the same bytes.

The page says with care that training losses of different objectives or mask rates are different quantities. Only
validation losses compare runs: their rows and masks are fixed, whatever a phase trains.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from command_line import Failure, UsageError
from evaluation.report.curves import Curve, Plot, draw, last_token, legend, phase_boundaries
from evaluation.report.page import NONE, page, table
from evaluation.report.run_folders import Milestone, Phase, Run, read_runs


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Read the run folders and write the page to `out`, which is replaced. Raises Failure or UsageError."""
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name the HTML file to write")
    if not out.parent.is_dir():
        raise UsageError(f"the folder of --out {out} does not exist; make it first")
    text = render(read_runs(folders))
    try:
        out.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise Failure(f"cannot write {out}: {error.strerror}") from None


def render(runs: Sequence[Run]) -> str:
    """Return the page as HTML."""
    plots = _plots(runs)
    sections = [
        f'<p class="lead">{escape(_conclusion(runs))}</p>',
        _remarks(runs),
        "<h2>Validation</h2>",
        _result_table(runs),
        _milestone_table(runs),
        "<p>Losses are in nats per predicted token, on the same held-out rows each time, and for MLM with the same "
        "masked positions. Perplexity is e to the power of the loss: the number of equally likely tokens "
        "between which the model still hesitates, in effect. Lower is better.</p>",
        '<h2>Curves</h2><div class="plots">',
        *(
            f'<figure id="{plot.key}"><h3>{escape(plot.title)}</h3>{legend(plot)}{draw(plot)}'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
            for plot, caption in plots
        ),
        "</div><h2>Runs</h2>",
        *(_run_table(run) for run in runs),
    ]
    return page("Continued pretraining: what the runs gave", sections)


# ---- words ----------------------------------------------------------------------------------------------------------


def _conclusion(runs: Sequence[Run]) -> str:
    """Say what the page shows in a sentence or two."""
    first = _last(runs[0])
    sentences = []
    for run in runs:
        point = _last(run)
        if point is None:
            sentences.append(f"{run.name} has no validation loss yet.")
            continue
        if not run.finished:
            verb = f"is unfinished; at {point.tokens:,} tokens it has"
        elif point.tokens < run.phases[-1].offset + run.phases[-1].trained:
            verb = f"was not validated at its end; at {point.tokens:,} tokens it has"
        else:
            verb = "ends with"
        sentence = f"{run.name} {verb} a validation MLM loss of {_loss(point.losses.mlm_loss)}"
        if first and run is not runs[0]:
            difference = point.losses.mlm_loss - first.losses.mlm_loss
            if math.isfinite(difference):
                distance = (
                    f"{abs(difference):.4f} {'above' if difference > 0 else 'below'}" if difference else "equal to"
                )
                sentence += f", {distance} {runs[0].name}"
        sentences.append(sentence + ".")
    if len(runs) > 1:
        sentences.append(
            "Which encoder serves better is decided by fine-tuning on tasks with several seeds, not by this loss alone."
        )
    return " ".join(sentences)


def _remarks(runs: Sequence[Run]) -> str:
    """List what a reader must know before trusting a comparison."""
    remarks = []
    for run in runs:
        for phase in run.phases:
            where = f"{run.name}, {phase.name}: "
            if not phase.started:
                remarks.append(where + "not started yet.")
            elif not phase.finished:
                remarks.append(where + f"unfinished, {phase.trained:,} of {phase.budget:,} tokens.")
            if phase.cut_off:
                remarks.append(where + "the last line of the metrics is incomplete and was left out.")
            if phase.superseded:
                remarks.append(
                    where + f"{phase.superseded} logged lines were left out, since training went back to a checkpoint "
                    "and logged these steps again."
                )
            gaps = sum(math.isnan(point.loss) for point in phase.training)
            if gaps:
                remarks.append(where + f"{gaps} logged steps have no finite training loss; the curves have gaps there.")
        if run.setting("start") is not None:
            remarks.append(f"{run.name}: branched from another run's checkpoint; its tokens count from there.")

    def differ(value: Callable[[Run], object]) -> bool:
        return len({repr(value(run)) for run in runs}) > 1

    measured = {point.rows for run in runs for phase in run.phases for point in phase.validation if point.rows}
    if len(measured) > 1 or differ(lambda run: run.setting("data", "validation")):
        remarks.append("The runs were validated on different rows: their validation losses cannot be compared.")
    if differ(lambda run: run.setting("validation", "mask_rate")):
        remarks.append("The runs were validated at different mask rates: their MLM losses cannot be compared.")
    if differ(lambda run: run.setting("data_seed")):
        remarks.append("The runs saw the data in different orders (data_seed).")
    if differ(lambda run: [phase.budget for phase in run.phases]):
        remarks.append("The runs have different token budgets: they are not matched.")
    starts = [m.losses.mlm_loss for run in runs for m in run.milestones()[:1] if m.label == "start"]
    if starts and max(starts) - min(starts) > 1e-3 * abs(min(starts)):
        remarks.append("The runs start from different validation losses: not the same encoder, or not the same rows.")
    items = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    return f'<section class="remarks"><h2>Before you compare</h2><ul>{items}</ul></section>' if remarks else ""


def _plots(runs: Sequence[Run]) -> list[tuple[Plot, str]]:
    """Return the plots that have something to show, each with its caption."""
    end, boundaries = last_token(runs), phase_boundaries(runs)

    def curves(values: Callable[[Phase], list[tuple[int, float]]]) -> list[Curve]:
        return [
            Curve(
                run=index,
                run_name=run.name,
                phase_name=phase.name,
                objective=phase.objective,
                tokens=[phase.offset + tokens for tokens, _ in points],
                values=[value for _, value in points],
            )
            for index, run in enumerate(runs)
            for phase in run.phases
            if (points := values(phase))
        ]

    mlm = curves(lambda phase: [(point.tokens, point.mlm_loss) for point in phase.validation])
    clm = curves(lambda phase: [(point.tokens, point.clm_loss) for point in phase.validation])
    loss = curves(lambda phase: [(point.tokens, point.loss) for point in phase.training])
    rate = curves(lambda phase: [(point.tokens, point.learning_rate) for point in phase.training])
    norm = curves(lambda phase: [(point.tokens, point.grad_norm) for point in phase.training])
    matched = len(runs) > 1
    broader = " The curves of matched runs lie on top of each other; earlier runs are drawn broader to stay visible."
    plots = [
        (
            Plot("validation-mlm", "Validation MLM loss", "MLM loss", mlm, end, boundaries, sparse=True),
            "Always the same rows with the same masked tokens, whatever the phase trains: these curves may be compared "
            "between runs and phases. A CLM phase does not train this loss and may raise it; what counts is where the "
            "last phase ends.",
        ),
        (
            Plot("validation-clm", "Validation CLM loss", "CLM loss", clm, end, boundaries, sparse=True),
            "Next-token loss on the same rows under the causal mask; it may be compared between runs and phases too. "
            "It shows what a CLM phase taught and how much of it the return to MLM keeps; it is not the aim of the "
            "detour.",
        ),
        (
            Plot("training-loss", "Training loss", "training loss", loss, end, boundaries),
            "The loss that each phase minimises. Training losses of different objectives or mask rates are different "
            "quantities and cannot be compared directly: look at each curve's course, and compare the runs by the "
            "validation losses.",
        ),
        (
            Plot(
                "learning-rate", "Learning rate", "learning rate", rate, end, boundaries, overlapping=matched, zero=True
            ),
            "Written into the optimizer at each step." + (broader if matched else ""),
        ),
        (
            Plot("grad-norm", "Gradient norm", "gradient norm", norm, end, boundaries, log=True),
            "As logged at each step, on a logarithmic axis. Single spikes are normal; a lasting rise is a warning of "
            "instability. Norms of different objectives are not comparable in height.",
        ),
    ]
    thinned = " Of neighbouring steps only the lowest and the highest are drawn."
    return [
        (plot, caption + (thinned if any(curve.thinned for curve in plot.curves) else ""))
        for plot, caption in plots
        if any(not math.isnan(value) for curve in plot.curves for value in curve.values)
    ]


# ---- tables ---------------------------------------------------------------------------------------------------------


def _last(run: Run) -> Milestone | None:
    return next(reversed(run.milestones()), None)


def _loss(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:.4f}"


def _perplexity(loss: float) -> str:
    return NONE if math.isnan(loss) or loss > 700 else f"{math.exp(loss):,.2f}"


def _signed(value: float) -> str:
    if math.isnan(value) or value == 0:
        return NONE if math.isnan(value) else "0.0000"
    return f"{value:+.4f}".replace("-", "\N{MINUS SIGN}")


def _median(values: Sequence[float], form: str) -> str:
    finite = [value for value in values if not math.isnan(value)]
    return format(statistics.median(finite), form) if finite else NONE


def _result_table(runs: Sequence[Run]) -> str:
    """Put the numbers that matter first, because a narrow screen shows only the first columns without scrolling."""
    first = _last(runs[0])
    rows = []
    for run in runs:
        last = _last(run)
        mlm = last.losses.mlm_loss if last else math.nan
        difference = [_signed(mlm - first.losses.mlm_loss) if first else NONE] if len(runs) > 1 else []
        measured = [last.label, f"{last.tokens:,}"] if last else ["not validated yet", NONE]
        rows.append([run.name, _loss(mlm), *difference, _perplexity(mlm), *measured])
    difference = [f"Difference to {runs[0].name}"] if len(runs) > 1 else []
    head = ["Run", "MLM loss", *difference, "MLM perplexity", "Measured", "Tokens"]
    return table("Last validation of each run", head, {"": rows})


def _milestone_table(runs: Sequence[Run]) -> str:
    groups = {
        run.name: [
            [
                milestone.label,
                _loss(milestone.losses.mlm_loss),
                _perplexity(milestone.losses.mlm_loss),
                _loss(milestone.losses.clm_loss),
                _perplexity(milestone.losses.clm_loss),
                f"{milestone.tokens:,}",
            ]
            for milestone in run.milestones()
        ]
        or [["not validated yet", NONE, NONE, NONE, NONE, NONE]]
        for run in runs
    }
    head = ["Measured", "MLM loss", "MLM perplexity", "CLM loss", "CLM perplexity", "Tokens"]
    return table("Validation at the start and after each phase", head, groups)


def _run_table(run: Run) -> str:
    rows = [_phase_row(phase) for phase in run.phases]
    total, budget = sum(phase.trained for phase in run.phases), sum(phase.budget for phase in run.phases)
    last = _last(run)
    facts = [
        "Finished" if run.finished else "Unfinished",
        f"{total:,} of {budget:,} tokens",
        *(
            f"{words} {value}"
            for words, value in (
                ("seed", run.setting("seed")),
                ("data seed", run.setting("data_seed")),
                ("rows a step", run.setting("batch", "rows")),
                ("validation rows", run.setting("validation", "rows")),
            )
            if isinstance(value, int)
        ),
        f"last validation: MLM loss {_loss(last.losses.mlm_loss)}, CLM loss {_loss(last.losses.clm_loss)}"
        if last
        else "not validated yet",
    ]
    head = ["Phase", "Objective", "Mask rate", "Tokens", "Budget", "State", "Tokens/s, median", "MFU, median"]
    return table(run.name, [*head, "Last training loss"], {"": rows}, "; ".join(facts) + ".")


def _phase_row(phase: Phase) -> list[str]:
    state = "finished" if phase.finished else f"{phase.trained / phase.budget:.0%}" if phase.budget else "unfinished"
    return [
        phase.name,
        phase.objective.upper(),
        NONE if phase.mask_rate is None else f"{phase.mask_rate:.0%}",
        f"{phase.trained:,}",
        f"{phase.budget:,}",
        state if phase.started or phase.finished else "not started",
        _median([point.tokens_per_second for point in phase.training], ",.0f"),
        _median([point.utilization for point in phase.training], ".1%"),
        _loss(phase.training[-1].loss if phase.training else math.nan),
    ]

"""What convergence.py says of its rows: the table in markdown, what docs/METHODS.md has of it, and
the plot.

Invariant: every figure comes from rows and claims; neither network nor torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from report import columns
from report.rows import Row

from training import stats
from training.claims import CLAIMS, HALF, Claim
from training.exact import Exact
from training.methods import METHODS
from training.plan import SETTINGS, Plan
from training.tasks import parameters_of

HEADS = ("method", "beside", "loss", "difference", "upper 95 %", "margin", "pairs", "verdict")
METHOD_HEADS = (
    "setting",
    "method",
    "rate",
    "loss",
    "deviation",
    "bytes a step and parameter",
    "real processes",
)
ADVISED_HEADS = ("", "method", "beside", "bytes", *HEADS[3:6], HEADS[7])
DOCUMENT_HEADS = ("method", "beside", "difference", "verdict")
TRAINING = {"T1": "", "T4": ", fine-tuning", "T5": ", images"}
EDGE = "*"  # behind a method whose tuned rate is the first or last of those that were tried
NOTES = (
    "Verdict: by the margin before it and the upper 95 % bound; loses: by 5 errors; leaves: of the "
    f"stale gap. {EDGE}: the best rate is the first or last that was tried. Where a row does not "
    "say: DDP, float32; gamma .7, mu .5; int4 with feedback."
)
ASIDES = "Without a margin (N% of the steps: as many as the same time allows):"
JUDGED = {claim.row for claim in CLAIMS if claim.kind != "printed"}
#: What the whole table leaves out of names and figures; its notes say so.
SHORT = (
    (", DDP, float32", ""),
    (", float32", ""),
    (" with feedback", ""),
    (" ± ", "±"),
    (" as it is by default", ""),
    ("nothing compressed", "uncompressed"),
    ("H = ", "H="),
    ("one step stale", "stale"),
    ("the variance frozen", "frozen"),
    (", gamma .7", ""),
    (", mu .5", ""),
    (" of the gap", ""),
    (" %", "%"),
)
#: Of the plot's points: one colour for each optimizer.
SHOWN: Mapping[str, Sequence[str]] = {
    "AdamW": (
        "adamw",
        "int8",
        "int4",
        "torch-fp16",
        "powersgd-4",
        "adamw-stale",
        "onebit-adam",
        "outer-int4",
        "outer-sparse",
        "outer-sparse-64",
        "stellatrain",
    ),
    "Muon": ("muon", "muon-int4", "muon-owner-int8", "outer-muon", "outer-muon-30"),
    "SGD": ("sgd", "sgd-onebit"),
    "Lion": ("lion", "lion-momentum"),
}


def losses(rows: Mapping[int, Row]) -> dict[int, float | None]:
    """By seed."""
    return {seed: row["loss"] for seed, row in rows.items()}


def judge(claim: Claim, plan: Plan) -> tuple[str, ...]:
    """A claim as the columns of HEADS."""
    head = (_name(claim), claim.baseline)
    method, baseline = (
        losses(plan.finals(claim.setting, name, claim.lr))
        for name in (claim.method, claim.baseline)
    )
    if claim.kind == "null" and not set(method) & set(baseline):
        baseline = dict(zip(sorted(method), (baseline[k] for k in sorted(baseline)), strict=False))
    pairs = set(method) & set(baseline)
    if len(pairs) < 2:
        return (*head, "-", "-", "-", _margin(claim), str(len(pairs)), "not run yet")
    pair = stats.paired(method, baseline)
    loss = sum(stats.loss_of(method[seed]) for seed in pairs) / len(pairs)
    shown = (
        f"{loss:.3f}",
        f"{pair.mean:+.4f} ± {pair.error:.4f}",
        f"{pair.upper:+.4f}",
        _margin(claim),
        str(pair.seeds),
    )
    if claim.kind == "correction":
        return (*head, *shown, _correction(claim, plan, method, baseline))
    verdict = {
        "margin": lambda: stats.non_inferior(pair, claim.margin or 0.0),
        "bad": lambda: stats.loses(pair),
        "null": lambda: stats.null(pair, claim.margin or 0.0),
        "printed": lambda: "-",
    }[claim.kind]()
    return (*head, *shown, verdict)


def _correction(
    claim: Claim, plan: Plan, method: dict[int, float | None], baseline: dict[int, float | None]
) -> str:
    stale = losses(plan.finals(claim.setting, claim.stale))
    seeds = sorted(set(method) & set(baseline) & set(stale))
    if len(seeds) < 2:
        return "uncorrected not run yet"
    stale, method = ({seed: one[seed] for seed in seeds} for one in (stale, method))
    left = stats.share_left(stats.paired(stale, baseline), stats.paired(method, baseline))
    over = stats.of_differences(
        [
            stats.loss_of(method[seed])
            - stats.loss_of(baseline[seed])
            - HALF * (stats.loss_of(stale[seed]) - stats.loss_of(baseline[seed]))
            for seed in seeds
        ]
    )
    verdict = {"no worse": "met", "worse": "missed"}.get(stats.non_inferior(over, 0.0), "not shown")
    return f"leaves {left:.0%} of the gap: {verdict}"


def _margin(claim: Claim) -> str:
    if claim.kind == "bad":
        return f"{stats.STANDARD_ERRORS:g} errors"
    if claim.kind == "correction":
        return f"{HALF:.0%}"
    return "-" if claim.margin is None else f"{claim.margin:g}"


def _name(claim: Claim) -> str:
    name = claim.method if claim.setting == "T1" else f"{claim.method}, {claim.setting}"
    return name if claim.lr is None else f"{name}, both at {claim.lr:g}"


def claims(plan: Plan) -> list[tuple[str, list[tuple[str, ...]]]]:
    """The judged claims by group."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for claim in CLAIMS:
        groups.setdefault(claim.row, []).append(judge(claim, plan))
    return list(groups.items())


def methods(plan: Plan) -> list[tuple[str, ...]]:
    """Each method with its rate, loss and bytes, and the check over real processes."""
    found = []
    for setting in SETTINGS:
        for method in plan.methods:
            rows = plan.finals(setting, method.name)
            if rows:
                found.append(_of_method(plan, setting, method.name, rows))
    return found


def _of_method(plan: Plan, setting: str, name: str, rows: Mapping[int, Row]) -> tuple[str, ...]:
    each = [stats.loss_of(row["loss"]) for row in rows.values()]
    mean = _mean(rows)
    spread = (sum((one - mean) ** 2 for one in each) / max(1, len(each) - 1)) ** 0.5
    rate = f"{next(iter(rows.values()))['lr']:g}{_edge(plan, setting, name)}"
    return (
        setting,
        name,
        rate,
        f"{mean:.3f}",
        f"{spread:.3f}",
        _bytes(name, rows),
        plan.process_check(setting, name),
    )


def _bytes(name: str, rows: Mapping[int, Row]) -> str:
    """Sent by rank 0 per parameter and step; "~" before what is known by formula alone."""
    by_formula = METHODS[name].sends
    if by_formula is not None:
        return f"~{by_formula:.2f}"
    row = next(iter(rows.values()))
    sent = row["sent"] / row["steps"] / parameters_of(SETTINGS[row["setting"]])
    if not sent:
        return "-"
    return f"{sent:.2f}" if sent >= 0.1 else f"{sent:.3f}"


def _edge(plan: Plan, setting: str, name: str) -> str:
    return "" if plan.is_interior(METHODS[name], setting) else EDGE


def markdown(plan: Plan, exact: Sequence[Exact]) -> str:
    """All of it, to paste."""
    lines = [_progress(plan), ""]
    if exact:
        rows = [("example", "with", "at most", "without", "at least", "verdict")]
        rows += [
            (
                one.what,
                f"{one.good:.2g}",
                f"{one.bound:g}",
                f"{one.bad:.3g}",
                f"{one.failed:g}",
                "as it must" if one.holds else "WRONG",
            )
            for one in exact
        ]
        lines += ["### Counter-examples", "", *columns.markdown(rows), ""]
    for group, judged in claims(plan):
        table = columns.markdown([HEADS, *judged])
        lines += [f"### {group[0].upper()}{group[1:]}", "", *table, ""]
    lines += ["### Methods", "", *columns.markdown([METHOD_HEADS, *methods(plan)])]
    return "\n".join(lines) + "\n"


def document(plan: Plan, advised: bool = False) -> str:
    """Claims that have two pairs at least, in words.

    Args:
        advised: those that docs/METHODS.md shows beside its advice, or all others.
    """
    rows: list[Sequence[str]] = [ADVISED_HEADS if advised else DOCUMENT_HEADS]
    asides: dict[str, list[str]] = {}
    for claim in CLAIMS:
        _, _, loss, difference, upper, margin, pairs, verdict = judge(claim, plan)
        if loss == "-" or advised != claim.advised:
            continue
        few = f" ({pairs} pairs)" * (int(pairs) != len(METHODS[claim.method].seeds))
        method = _told(claim, plan, claim.method) + TRAINING[claim.setting]
        beside = _told(claim, plan, claim.baseline)
        if advised:
            sent = _bytes(claim.method, plan.finals(claim.setting, claim.method, claim.lr))
            shown = (difference, upper, margin, verdict + few)
            rows.append((claim.row, method, beside, sent, *shown))
        elif claim.kind != "printed":
            judged = verdict if claim.margin is None else f"{margin}: {verdict}"
            rows.append([*map(_short, (method, beside, difference, judged + few))])
        elif claim.row not in JUDGED:
            aside = f"{difference} beside {beside}{few}"
            asides.setdefault(_short(method), []).append(_short(aside))
    parts = [_progress(plan) + f" {NOTES}" * (not advised), "\n".join(columns.markdown(rows))]
    if asides:
        lines = [f"- {method}: {'; '.join(each)}" for method, each in asides.items()]
        parts += [ASIDES, "\n".join(lines)]
    return "\n\n".join(parts)


def _short(text: str) -> str:
    for long, short in SHORT:
        text = text.replace(long, short)
    return text


def _told(claim: Claim, plan: Plan, name: str) -> str:
    """A method of a claim, in words."""
    if claim.lr is not None:
        return f"{METHODS[name].about}, rate {claim.lr:g}"
    return METHODS[name].about + _edge(plan, claim.setting, name)


def _progress(plan: Plan) -> str:
    done, total, _ = plan.count()
    rows = list(plan.rows)
    told = sorted({f"torch {row['torch']}, Python {row['python']}, {row['cpu']}" for row in rows})
    return f"{done} of {total} runs; {'; '.join(told) or 'no rows'}."


def plot(plan: Plan, path: Path) -> None:
    """What methods end at from scratch, and what they send for it: best on top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ended = sorted(
        (_mean(rows), optimizer, name, rows)
        for optimizer, names in SHOWN.items()
        for name in names
        if (rows := plan.finals("T1", name))
    )
    figure, axes = pyplot.subplots(
        figsize=(9, max(2.5, 0.3 * len(ended) + 1)), layout="constrained"
    )
    colors = dict(zip(SHOWN, ("tab:blue", "tab:orange", "tab:green", "tab:red"), strict=True))
    for place, (mean, optimizer, _, rows) in enumerate(ended):
        errors = [stats.loss_of(row["loss"]) - mean for row in rows.values()]
        axes.plot([mean + error for error in errors], [place] * len(errors), "|", color="lightgray")
        axes.plot(mean, place, "o", color=colors[optimizer])
    axes.set_yticks(range(len(ended)), [METHODS[name].about for *_, name, _ in ended], fontsize=9)
    axes.invert_yaxis()
    sent = axes.secondary_yaxis("right")
    sent.set_yticks(range(len(ended)), [_bytes(name, rows) for *_, name, rows in ended], fontsize=9)
    sent.set_ylabel("bytes per parameter and step")
    axes.grid(axis="x", color="whitesmoke")
    axes.set_xlabel("loss after as many samples, nats (point: mean of the seeds; strokes: each)")
    axes.legend(
        handles=[
            axes.plot([], [], "o", color=color, label=optimizer)[0]
            for optimizer, color in colors.items()
        ],
        fontsize=9,
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _mean(rows: Mapping[int, Row]) -> float:
    return sum(stats.loss_of(row["loss"]) for row in rows.values()) / len(rows)

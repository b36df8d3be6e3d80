"""What convergence.py says of its rows: the table in markdown, what docs/METHODS.md has of it, and
the plot.

Invariant: every figure comes from rows and claims; neither network nor torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _columns
from _rows import Row

from training import stats
from training.claims import CLAIMS, HALF, Claim
from training.exact import Exact
from training.methods import METHODS
from training.plan import SETTINGS, Plan
from training.tasks import parameters_of

HEADS = ("method", "beside", "loss", "difference", "upper 95 %", "margin", "pairs", "verdict")
METHOD_HEADS = ("setting", "method", "rate", "loss", "deviation", "bytes a step and parameter",
                "real processes")  # fmt: skip
DOCUMENT_HEADS = ("", "method", "beside", *HEADS[3:6], HEADS[7])
TRAINING = {"T1": "", "T4": ", fine-tuning", "T5": ", images"}
#: Of the plot's curves: one optimizer each, all of whose ranks step as one with nothing lost; and
#: one method of each family.
SYNCHRONOUS = ("adamw", "muon", "sgd", "lion")
CURVES = (*SYNCHRONOUS, "int4", "onebit-adam", "lion-momentum", "adamw-stale", "outer-int4")


def losses(rows: Mapping[int, Row]) -> dict[int, float | None]:
    """By seed."""
    return {seed: row["loss"] for seed, row in rows.items()}


def judge(claim: Claim, plan: Plan) -> tuple[str, ...]:
    """A claim as the columns of HEADS."""
    head = (_name(claim.method, claim.setting), claim.baseline)
    for name in filter(None, (claim.method, claim.baseline, claim.stale)):
        missing = METHODS[name].missing() if name in METHODS else name
        if missing:
            return (*head, "-", "-", "-", _margin(claim), "0", f"not built yet: {missing}")
    method = losses(plan.finals(claim.setting, claim.method))
    baseline = losses(plan.finals(claim.setting, claim.baseline))
    if claim.kind == "null" and not set(method) & set(baseline):
        baseline = dict(zip(sorted(method), (baseline[k] for k in sorted(baseline)), strict=False))
    pairs = set(method) & set(baseline)
    if len(pairs) < 2:
        return (*head, "-", "-", "-", _margin(claim), str(len(pairs)), "not run yet")
    pair = stats.paired(method, baseline)
    loss = sum(stats.loss_of(method[seed]) for seed in pairs) / len(pairs)
    shown = (f"{loss:.3f}", f"{pair.mean:+.4f} ± {pair.error:.4f}", f"{pair.upper:+.4f}",
             _margin(claim), str(pair.seeds))  # fmt: skip
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
    over = stats.of_differences([
        stats.loss_of(method[seed]) - stats.loss_of(baseline[seed])
        - HALF * (stats.loss_of(stale[seed]) - stats.loss_of(baseline[seed]))
        for seed in seeds
    ])  # fmt: skip
    verdict = {"no worse": "met", "worse": "missed"}.get(stats.non_inferior(over, 0.0), "not shown")
    return f"leaves {left:.0%} of the gap: {verdict}"


def _margin(claim: Claim) -> str:
    if claim.kind == "bad":
        return f"{stats.STANDARD_ERRORS:g} errors"
    if claim.kind == "correction":
        return f"{HALF:.0%}"
    return "-" if claim.margin is None else f"{claim.margin:g}"


def _name(method: str, setting: str) -> str:
    return method if setting == "T1" else f"{method}, {setting}"


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
    mean = sum(each) / len(each)
    spread = (sum((one - mean) ** 2 for one in each) / max(1, len(each) - 1)) ** 0.5
    row = next(iter(rows.values()))
    sent = row["sent"] / row["steps"] / parameters_of(SETTINGS[setting])
    rate = f"{row['lr']:g}" + ("" if plan.is_interior(METHODS[name], setting) else " (edge)")
    return (setting, name, rate, f"{mean:.3f}", f"{spread:.3f}", f"{sent:.3f}" if sent else "-",
            plan.process_check(setting, name))  # fmt: skip


def markdown(plan: Plan, exact: Sequence[Exact]) -> str:
    """All of it, to paste."""
    lines = [_progress(plan), ""]
    if exact:
        rows = [("example", "with", "at most", "without", "at least", "verdict")]
        rows += [(one.what, f"{one.good:.2g}", f"{one.bound:g}", f"{one.bad:.3g}",
                  f"{one.failed:g}", "as it must" if one.holds else "WRONG")
                 for one in exact]  # fmt: skip
        lines += ["### Counter-examples", "", *_columns.markdown(rows), ""]
    for group, judged in claims(plan):
        table = _columns.markdown([HEADS, *judged])
        lines += [f"### {group[0].upper()}{group[1:]}", "", *table, ""]
    lines += ["### Methods", "", *_columns.markdown([METHOD_HEADS, *methods(plan)])]
    return "\n".join(lines) + "\n"


def document(plan: Plan) -> str:
    """What has a verdict, or two pairs at least, in words."""
    rows: list[Sequence[str]] = [DOCUMENT_HEADS]
    for claim in CLAIMS:
        _, _, loss, *shown, pairs, verdict = judge(claim, plan)
        if loss == "-":
            continue
        names = [METHODS[name].about for name in (claim.method, claim.baseline)]
        note = "" if int(pairs) == len(METHODS[claim.method].seeds) else f" ({pairs} pairs)"
        rows.append((claim.row, names[0] + TRAINING[claim.setting], names[1], *shown,
                     verdict + note))  # fmt: skip
    return "\n".join([_progress(plan), "", *_columns.markdown(rows)])


def _progress(plan: Plan) -> str:
    done, total, _ = plan.count()
    rows = list(plan.rows)
    told = sorted({f"torch {row['torch']}, Python {row['python']}, {row['cpu']}" for row in rows})
    return f"{done} of {total} runs; {'; '.join(told) or 'no rows'}."


def plot(plan: Plan, path: Path) -> None:
    """Differences to the baselines with their bounds and margins, and the loss over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    judged = [(claim, pair) for claim in CLAIMS if (pair := _pair(claim, plan)) is not None]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, max(4.5, 0.28 * len(judged) + 1.5)), layout="constrained"
    )
    for place, (claim, pair) in enumerate(reversed(judged)):
        color = {"bad": "tab:red", "margin": "tab:blue"}.get(claim.kind, "gray")
        reach = pair.upper - pair.mean
        left.errorbar(pair.mean, place, xerr=reach, fmt="o", color=color, markersize=4, capsize=2)
        if claim.margin is not None:
            left.plot([claim.margin] * 2, [place - 0.4, place + 0.4], color="black")
    labels = [f"{_name(c.method, c.setting)} − {c.baseline}" for c, _ in reversed(judged)]
    left.set_yticks(range(len(judged)), labels, fontsize=8)
    left.axvline(0, color="lightgray", zorder=0)
    left.set_xscale("symlog", linthresh=0.01)
    left.set(xlabel="difference in nats, 95 % bounds; black: margin")
    _curves(plan, right)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pair(claim: Claim, plan: Plan) -> stats.Paired | None:
    if any(
        name not in METHODS or METHODS[name].missing() for name in (claim.method, claim.baseline)
    ):
        return None
    method = losses(plan.finals(claim.setting, claim.method))
    baseline = losses(plan.finals(claim.setting, claim.baseline))
    return stats.paired(method, baseline) if len(set(method) & set(baseline)) > 1 else None


def _curves(plan: Plan, axes: Any) -> None:
    for name in CURVES:
        rows = list(plan.finals("T1", name).values())
        curves = [row["curve"] for row in rows if all(loss for _, loss in row["curve"])]
        if curves:
            steps = [step for step, _ in curves[0]]
            means = [sum(curve[at][1] for curve in curves) / len(curves)
                     for at in range(len(steps))]  # fmt: skip
            axes.plot(steps, means, "-" if name in SYNCHRONOUS else "--", label=METHODS[name].about)
    axes.set(xlabel="batches of each rank (T1)", ylabel="nats, mean over the seeds", ylim=(1.2, 3))
    if axes.lines:
        axes.legend(fontsize=8)

"""What a trial of faults.py comes to, and the table of many: pure functions over its rows.

A trial is short of what docs/RELIABILITY.md claims if a rank gets no exception within the bound, if
an exception is none of ringcomm's, or does not name the rail that was hurt where there are several,
or names others and not the host that was hurt; if a sum was wrong or a process crashed. In bring-up
the job may start without the port instead, if a rank says so in its log; ranks wait connect_timeout
for one that was cut off before it had reached rank 0, or another rank; and a rank that never was in
is lost as a whole, and not on a rail.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.cluster import FIRST_NET

from trials.fault_lab import FAULTS, PHASES, Trial

GRACE_S = 2.0  # added to peer_timeout: what noticing, telling all ranks and waking them may take

_OWN_PLACE = re.compile(r"^.*? failed on rank \d+ \([^)]*\) after [\d.]+ s: ", re.DOTALL)
_NAMED = re.compile(r"\b(?:ranks?|host) ?(\d+(?:(?:, | and )\d+)*)\b")

RAIL = ("rail", "none", "wrong")
_AWAITED = ("was not found within", "could be joined within")
BLAME = ("host", "pair", "own end", "nobody", "wrong")
"""Whom an exception names, best first: the hurt host by its rank; it among others; the hurt host's
own rank names the other end, as it cannot know better; nobody; others."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a trial.

    Attributes:
        seconds: from the fault until the slowest rank had its exception, or the job had started
            without the port; infinite if a rank never came so far.
        limit: the setting that bounds that.
        left_out: the job started without the port.
        rails: of each rank's exception, whether it names the hurt rail: one of RAIL.
        blames: of each, whom it names: one of BLAME.
        short: in what it falls short; empty if in nothing.
    """

    seconds: float
    limit: str
    left_out: bool
    rails: tuple[str, ...]
    blames: tuple[str, ...]
    short: tuple[str, ...]

    @property
    def rail(self) -> str:
        """The worst of rails; "-" if there is none."""
        return max(self.rails, key=RAIL.index, default="-")

    @property
    def blame(self) -> str:
        """The worst of blames; "-" if there is none."""
        return max(self.blames, key=BLAME.index, default="-")


def judge(row: dict[str, Any]) -> Verdict:
    """The verdict on a row."""
    trial, ranks = Trial(**row["trial"]), row["ranks"]
    failed = [rank for rank in ranks if rank["error"]]
    left_out = not failed and trial.phase == "bring-up" and not _still_has(trial, ranks)
    came = "opened" if left_out else "failed"
    missing = sum(came not in rank["after"] for rank in ranks)
    seconds = float("inf") if missing else max(rank["after"][came] for rank in ranks)
    named = Verdict(
        seconds,
        _limit(ranks),
        left_out,
        tuple(_rail(trial, rank["error"]) for rank in failed),
        tuple(_blame(trial, me, r["error"]) for me, r in enumerate(ranks) if r["error"]),
        (),
    )
    late = seconds > row["settings"][named.limit] + GRACE_S
    faults = {
        f"{missing} of {len(ranks)} ranks never noticed": missing,
        "late": late and not missing,
        "an untyped error": any(not rank["error"]["typed"] for rank in failed),
        f"rail: {named.rail}": named.rail in RAIL[1:] and _needs_rail(trial, ranks),
        f"host: {named.blame}": named.blame in ("nobody", "wrong"),
        "left out without a word": left_out and not any(_warns(trial, rank) for rank in ranks),
        "a wrong sum": any(rank["wrong"] for rank in ranks),
        "a crash": any(rank["code"] < 0 for rank in ranks),
    }
    short = tuple(name for name, is_so in faults.items() if is_so)
    return dataclasses.replace(named, short=short)


def _limit(ranks: Sequence[dict[str, Any]]) -> str:
    """The setting that bounds the trial. A rank that has not reached rank 0 when its port fails is
    to the others one that has not come yet, for which they wait; and ranks that cannot reach each
    other by any port go on trying."""
    texts = [rank["error"].get("text", "") for rank in ranks]
    awaited = any(word in text for text in texts for word in _AWAITED)
    return "connect_timeout" if awaited else "peer_timeout"


def _needs_rail(trial: Trial, ranks: Sequence[dict[str, Any]]) -> bool:
    """A rank that never was in is lost as a whole, and not on one of its rails."""
    hurt = {trial.host, trial.to} - {-1}
    return trial.ports > 1 and all("opened" in ranks[rank]["after"] for rank in hurt)


def _still_has(trial: Trial, ranks: Sequence[dict[str, Any]]) -> bool:
    return any(
        trial.hurts(me, peer, rail) for me, rank in enumerate(ranks) for peer, rail in rank["lanes"]
    )


def _warns(trial: Trial, rank: dict[str, Any]) -> bool:
    return any(f"rail {trial.nic} " in line for line in rank["logged"])


def _rail(trial: Trial, error: dict[str, Any]) -> str:
    """By number, by port, or by one of the rail's addresses, as tables of a bring-up have them."""
    if error["rail"] is not None:
        return "rail" if error["rail"] == trial.nic else "wrong"
    named = {int(number) for number in re.findall(r"\b(?:rail |eth)(\d+)", error["text"])}
    nets = re.findall(r"\b10\.(\d+)\.0\.\d+", error["text"])
    named |= {int(net) - FIRST_NET for net in nets}
    return "none" if not named else "rail" if trial.nic in named else "wrong"


def _blame(trial: Trial, me: int, error: dict[str, Any]) -> str:
    hurt = {trial.host, trial.to} - {-1}
    text = _OWN_PLACE.sub("", error["text"])
    named = {int(number) for group in _NAMED.findall(text) for number in re.findall(r"\d+", group)}
    if error["rank"] is not None:
        named.add(error["rank"])
    own_port = me in hurt and not named and f"eth{trial.nic}" in text
    if error["rank"] in hurt or own_port:
        return "host"
    if named & hurt:
        return "pair"
    return "nobody" if not named else "own end" if me in hurt else "wrong"


# ---- the table ----


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: a summary, a line per fault, world and phase, and what fell short."""
    judged = [(row, judge(row)) for row in rows]
    if not judged:
        return "No trials yet."
    ports = sorted({row["trial"]["ports"] for row, _ in judged}, reverse=True)
    parts = [_summary(judged)]
    for count in ports:
        mine = [(row, verdict) for row, verdict in judged if row["trial"]["ports"] == count]
        parts.append(
            f"**{count} port{'s' if count > 1 else ''} per host**\n\n"
            + _lines(mine, by_world=count > 1)
        )
    return "\n\n".join([*parts, *_shortfalls(judged)])


_Judged = list[tuple[dict[str, Any], Verdict]]


def _summary(judged: _Judged) -> str:
    settings = judged[0][0]["settings"]
    short = sum(bool(verdict.short) for _, verdict in judged)
    never = sum(verdict.seconds == float("inf") for _, verdict in judged)
    wrong = sum(bool({"rail: wrong", "host: wrong"} & set(v.short)) for _, v in judged)
    which = (
        f"{short} fall short, of which in {never} a rank never noticed, and in {wrong} an "
        "exception blames another end or rail"
    )
    parts = [f"{len(judged)} trials; {which if short else 'none falls short'}."]
    for limit, what in (
        ("peer_timeout", "heard of it"),
        ("connect_timeout", "heard of a rank that was cut off before it came"),
    ):
        ended = [v.seconds for _, v in judged if v.limit == limit and v.seconds != float("inf")]
        if ended:
            parts.append(
                f"The slowest rank {what} after {max(ended):.2f} s, with {limit} "
                f"{settings[limit]:g} s ({len(ended)} trials)."
            )
    machine = f"{os.cpu_count()} cores of {_cpu()}, {platform.system()} {platform.release()}"
    return " ".join([*parts, f"heartbeat {settings['heartbeat']:g} s; {machine}."])


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _lines(judged: _Judged, by_world: bool) -> str:
    lines = [
        "| fault | hosts | phase | trials | median | slowest | rail | host | short |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def key(trial: dict[str, Any]) -> tuple[str, str, str]:
        return trial["fault"], str(trial["world"]) if by_world else "all", trial["phase"]

    worlds = sorted({key(row["trial"])[1] for row, _ in judged})
    for fault in FAULTS:
        for world in worlds:
            for phase in PHASES:
                cell = [v for row, v in judged if key(row["trial"]) == (fault, world, phase)]
                if cell:
                    lines.append(f"| {fault} | {world} | {phase} | {_cell(cell)} |")
    return "\n".join(lines)


def _cell(verdicts: Sequence[Verdict]) -> str:
    ended = [verdict.seconds for verdict in verdicts]
    rails = Counter(rail for verdict in verdicts for rail in verdict.rails)
    blames = Counter(blame for verdict in verdicts for blame in verdict.blames)
    blames["started without"] = sum(verdict.left_out for verdict in verdicts)
    short = sum(bool(verdict.short) for verdict in verdicts)
    return (
        f"{len(verdicts)} | {_seconds(statistics.median(ended))} | {_seconds(max(ended))} | "
        f"{_counts(rails)} | {_counts(blames)} | {short or ''}"
    )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common() if count)


def _seconds(value: float) -> str:
    return "never" if value == float("inf") else f"{value:.2f} s"


def _shortfalls(judged: _Judged) -> list[str]:
    """What fell short, by kind, with an example of each."""
    examples: dict[str, tuple[int, dict[str, Any]]] = {}
    for row, verdict in judged:
        for short in verdict.short:
            count, example = examples.get(short, (0, row))
            examples[short] = (count + 1, example)
    if not examples:
        return []
    lines = [
        f"- {short}: {count}, as in {Trial(**row['trial'])}"
        for short, (count, row) in sorted(examples.items(), key=lambda e: -e[1][0])
    ]
    return ["Short:\n\n" + "\n".join(lines)]

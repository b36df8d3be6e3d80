"""What documents and code point at is there: files, their headings, headings named in words; and
what docs/ARCHITECTURE.md names: paths, functions, constants."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    ROOT / "bench/README.md",
    ROOT / "examples/README.md",
    ROOT / "tests/golden/README.md",
]
SOURCES = [
    path
    for folder in ("ringcomm", "csrc", "tests", "bench", "tools", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".c", ".h", ".cu", ".cuh"}
]

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.M | re.S)
_NAMED = re.compile(r'\b(docs/(?:[A-Z_]{3,}|decisions/[\w-]+)\.md)(#[\w-]+)?(?:,? \(?"([^"]+)")?')
"""In code: a document, perhaps its anchor, perhaps a heading in quotation marks."""
_FILE = r"[\w./*]+(?:\.(?:c|h|cu|cuh|py|md|toml)\b|/(?![\w./*]))"
_REFERENCE = re.compile(rf"{_FILE}|[\w.]+(?=\(\))|(?<=`)[A-Za-z_][\w.]*(?=`)|\b[A-Z]+_[A-Z_0-9]+\b")
"""In ARCHITECTURE.md: a file or folder, a function written with parentheses, another name that is a
code span, a constant."""


def _headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.*?)\s*$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.M)


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, punctuation gone, blanks as hyphens."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _headings(page)
    }


def _broken(target: Path, anchor: str) -> str | None:
    if not target.exists():
        return "no such file"
    if anchor and anchor not in _anchors(target):
        return f"no heading for #{anchor}"
    return None


def _links(page: Path) -> Iterator[tuple[str, str | None]]:
    """Each relative link of a page, and what is wrong with it."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        yield link, _broken((page.parent / path).resolve() if path else page, anchor)


def _names(source: Path) -> Iterator[tuple[str, str | None]]:
    """Each document that a source names, and what is wrong with that."""
    text = re.sub(r"\n *(?:\*|#|//)? *", " ", source.read_text(encoding="utf-8"))
    for path, anchor, heading in _NAMED.findall(text):
        wrong = _broken(ROOT / path, anchor.removeprefix("#"))
        if wrong is None and heading and heading not in _headings(ROOT / path):
            wrong = f"no heading {heading!r}"
        yield f"{path}{anchor} {heading}", wrong


def _is_defined(name: str, source: str) -> bool:
    """Whether a text of C or Python defines the function, and the class before its dot."""
    *kinds, function = map(re.escape, name.split("."))
    definition = rf"^ *def {function}\(|^(?:\w+[ *]+)+{function}\("
    patterns = [definition, *(rf"^class {kind}\b" for kind in kinds)]
    return all(re.search(pattern, source, re.M) for pattern in patterns)


def _references(text: str) -> Iterator[tuple[str, str | None]]:
    """Each path, function and name of a text, and what is wrong with it.

    Paths begin at the root, at csrc or at ringcomm. The file named last before a function defines
    it.
    """
    text = re.sub(r"\[[^]]*\]\([^)]*\)", "", text)
    sources = [path.read_text(encoding="utf-8") for path in SOURCES]
    words = {word for source in sources for word in re.findall(r"[\w-]+", source)}
    here = ""
    for reference in _REFERENCE.finditer(text):
        name = reference[0]
        if re.fullmatch(_FILE, name):
            found = [path for base in ("", "csrc", "ringcomm") for path in (ROOT / base).glob(name)]
            here = found[0].read_text("utf-8") if found and found[0].is_file() else ""
            yield name, None if found else "no such file"
        elif text.startswith("()", reference.end()):
            yield name, None if _is_defined(name, here) else "not defined in the file before it"
        else:
            yield name, None if set(name.split(".")) <= words else "nowhere in the sources"


def test_what_the_architecture_names_is_there() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    found = list(_references(text))
    assert len(found) > 300
    assert not [one for one in found if one[1]]
    assert len(text.splitlines()) <= 300


def test_links_between_documents_lead_somewhere() -> None:
    found = [(page.relative_to(ROOT), *link) for page in PAGES for link in _links(page)]
    assert len(found) > 50
    assert not [one for one in found if one[2]]


def test_every_decision_can_be_come_upon() -> None:
    """From a document that says what holds, or from the code that it is about."""
    pages = {page.name for page in (ROOT / "docs/decisions").glob("*.md")}
    read = [page for page in PAGES if page.parent.name != "decisions"] + SOURCES
    named = {
        name
        for path in read
        for name in re.findall(r"decisions/([\w-]+\.md)", path.read_text(encoding="utf-8"))
    }
    assert not pages - named


def test_documents_that_code_names_are_there() -> None:
    found = [(source.relative_to(ROOT), *name) for source in SOURCES for name in _names(source)]
    assert len(found) > 20
    assert not [one for one in found if one[2]]


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Über `x`, y\n\n[a](#über-x-y) [b](#z) [c](gone.md) [d](https://x.org/#y)\n"
        "```\n# no heading, [e](no/link.md)\n```\n",
        encoding="utf-8",
    )
    assert [link for link in _links(page) if link[1]] == [
        ("#z", "no heading for #z"),
        ("gone.md", "no such file"),
    ]
    source = tmp_path / "source.py"
    source.write_text("# docs/" + "GONE.md, and docs/WIRE" + '.md ("No\n# such heading").\n')
    assert [wrong for _, wrong in _names(source)] == [
        "no such file",
        "no heading 'No such heading'",
    ]


def test_a_name_that_is_nowhere_is_found() -> None:
    nowhere = "COMM_" + "NEVER"
    text = f"`api.c` `rc_check()` `rc_chec()` `net/lain.c` `rc_check()` {nowhere} [x](y.md)"
    assert list(_references(text + " `core/work.py` `Work.wait()` `Werk.wait()` `Work._held`")) == [
        ("api.c", None),
        ("rc_check", None),
        ("rc_chec", "not defined in the file before it"),
        ("net/lain.c", "no such file"),
        ("rc_check", "not defined in the file before it"),
        (nowhere, "nowhere in the sources"),
        ("core/work.py", None),
        ("Work.wait", None),
        ("Werk.wait", "not defined in the file before it"),
        ("Work._held", None),
    ]

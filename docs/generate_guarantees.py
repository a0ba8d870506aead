"""Write guarantees.md: every guarantee and the tests that hold it, from the markers `guarantee` in the tests.

A guarantee is not lost by accident: if no marker has a sentence of the page any more, nothing is written. A test
generates the page again and compares. Run `python docs/generate_guarantees.py` after a change of markers.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

INTRODUCTION = """\
# Guarantees

<!-- Generated from the markers `guarantee` of the tests by docs/generate_guarantees.py; edit there. -->

What must be exactly true, and the test files that check it. In a file, the marker `guarantee` with the sentence is on
the tests that check it. A test that needs a GPU or Slurm is skipped where there is none.
"""
HEADINGS = {
    "Datasets": ("datasets",),
    "Cache": ("cache",),
    "Training": ("train",),
    "Families of models": ("families",),
    "Answers and scores": ("eval",),
    "Runs": ("run", "workflow", "checks", "status", "proposal"),
    "Interruptions and failures": ("faults",),
    "Scripts of one's own": ("library", "trainers"),
    "Studies": ("study",),
    "Adapters": ("adapter",),
    "Reports": ("report",),
    "Self-test": ("selftest",),
    "Commands": ("commands", "keys", "shared"),
    "Damaged and hostile files": ("security",),
    "Slurm": ("slurm",),
}
"""The headings in their order, each with the packages whose tests are below it. A test that is in no package counts as
one of the package that its name begins with."""
ROW = re.compile(r"^\| (.+) \| (\[.+\)) \|$", re.M)


def page(root: Path) -> str:
    """The whole page, in an order that does not depend on the file system.

    Raises:
        ValueError: a marker is in a package without a heading.
    """
    guarantees: dict[str, list[Path]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for sentence in marked(path.read_text()):
            files = guarantees.setdefault(sentence, [])
            files += [path.relative_to(root)] if path.relative_to(root) not in files else []
    rows: dict[str, list[str]] = {name: [] for name in HEADINGS}
    for sentence, files in guarantees.items():
        first = min(files, key=lambda file: [*HEADINGS].index(heading(file)))
        links = ", ".join(f"[{file.name}](../{file})" for file in files)
        rows[heading(first)].append(f"| {sentence} | {links} |\n")
    tables = (
        f"\n## {name}\n\n| guarantee | tests |\n|---|---|\n{''.join(lines)}" for name, lines in rows.items() if lines
    )
    return INTRODUCTION + "".join(tables)


def heading(file: Path) -> str:
    """The heading below which the guarantees of a test file are."""
    kind, *folders = file.parent.parts[1:]
    package = kind if kind == "slurm" else (folders or file.stem.split("_")[1:])[0]
    for name, packages in HEADINGS.items():
        if package in packages:
            return name
    raise ValueError(
        f"{file} has a guarantee, and HEADINGS in docs/generate_guarantees.py lacks {package!r}: add it there"
    )


def marked(source: str) -> list[str]:
    """The sentences of a test file's markers, in the order of its lines."""
    if "mark.guarantee(" not in source or "\ndef test_" not in source:  # to walk through all files takes a second more
        return []
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = [call for call in calls if ast.unparse(call.func) == "pytest.mark.guarantee"]
    return [ast.literal_eval(call.args[0]) for call in sorted(found, key=lambda call: call.lineno)]


def lost(before: str, after: str) -> list[str]:
    """The sentences that are on the page before and not after."""
    remaining = {sentence for sentence, _ in ROW.findall(after)}
    return [sentence for sentence, _ in ROW.findall(before) if sentence not in remaining]


def main() -> None:
    path = Path(__file__).with_name("guarantees.md")
    new = page(path.parents[1])
    if missing := lost(path.read_text() if path.exists() else "", new):
        sys.exit(
            "docs/guarantees.md is not written, because no test has these guarantees any more:\n"
            + "".join(f"  {sentence}\n" for sentence in missing)
            + "Restore the markers. If a sentence was reworded, delete its row in docs/guarantees.md and run again."
        )
    path.write_text(new)


if __name__ == "__main__":
    main()

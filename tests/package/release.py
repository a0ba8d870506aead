"""What a release needs beside its tests: python tests/package/release.py [NOTES]; uploads nothing.

Says why the version, the changelog or the tree is not ready, if it is not. Without NOTES that is a warning, so that all
checks run; with it, after them, it is an error. Else it then writes the release notes to that file, which are the
version's part of CHANGELOG.md, and prints the commands that tag and upload.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_SHOWN = 5
"""Changed files that are named."""
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")


def problems(changelog: str, version: str, citation: str, project: dict, changed: str) -> list[str]:
    """Why there can be no release now; empty if there can. `changed` is what `git status --porcelain` prints."""
    found = []
    if re.match(r"\s*-", unreleased(changelog)):
        found.append("CHANGELOG.md has entries under Unreleased; move them below `## VERSION (DATE)`")
    if not re.search(rf"^## {re.escape(version)} \(", changelog, re.M):
        found.append(f"CHANGELOG.md has no `## {version} (DATE)`; the version is in src/lookonce/version.py")
    elif wrong := [line for line in cited(changelog, version) if line not in citation.replace('"', "").splitlines()]:
        found.append(f"CITATION.cff has no line `{'` and none `'.join(wrong)}`")
    if "urls" not in project:
        found.append(
            'pyproject.toml names no address of the repository; add [project.urls] with Repository = "https://..."'
        )
    if files := changed.splitlines():
        more = f"\nand {len(files) - NUM_SHOWN:,} more" if len(files) > NUM_SHOWN else ""
        found.append("git has changes that are not committed:\n" + "\n".join(files[:NUM_SHOWN]) + more)
    return found


def cited(changelog: str, version: str) -> list[str]:
    """The lines about a version that CITATION.cff should have, without quotes."""
    [date] = re.findall(rf"^## {re.escape(version)} \((.*)\)$", changelog, re.M)
    return [f"version: {version}", f"date-released: {date}"]


def unreleased(changelog: str) -> str:
    return changelog.partition("\n## Unreleased\n")[2].partition("\n## ")[0]


def notes(changelog: str, version: str) -> str:
    """A version's part of the changelog, with links into the repository as plain text: a release has other paths."""
    text = re.split(rf"^## {re.escape(version)} \(.*\)$", changelog, maxsplit=1, flags=re.M)[1]
    return LINK.sub(r"\1", text.partition("\n## ")[0].strip()) + "\n"


def main() -> int:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [version] = re.findall(r'^__version__ = "(.+)"$', (ROOT / "src/lookonce/version.py").read_text(), re.M)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    is_last = len(sys.argv) > 1
    if found := problems(changelog, version, (ROOT / "CITATION.cff").read_text(), project, changed.stdout):
        print(*(f"cannot release {version}: {problem}" for problem in found), sep="\n", file=sys.stderr)
        after = "all checks have passed, and dist/ is built" if is_last else "the checks run all the same"
        print(f"nothing is uploaded or tagged; {after}. Mend what is named, then: make release", file=sys.stderr)
        return int(is_last)
    if is_last:
        Path(sys.argv[1]).parent.mkdir(exist_ok=True)
        Path(sys.argv[1]).write_text(notes(changelog, version))
        print(f"release notes: {sys.argv[1]}. Nothing is uploaded; these commands do it:")
        print(f"  git tag --annotate v{version} --file {sys.argv[1]} && git push origin v{version}")
        print("  .venv/bin/python -m twine upload dist/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())

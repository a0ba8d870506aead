"""Documents: links lead somewhere, commands parse, generated pages are current, figures are those of their reports."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from lookonce.cli import main
from lookonce.run.config import RunFile
from lookonce.study.file import StudyFile
from lookonce.version import __version__

MAX_WORDS = 700
"""The longest that the README may be."""
MAX_ARCHITECTURE = 12_000
"""The most bytes that ARCHITECTURE.md may have."""
MAX_GLOSSARY = 20
"""The most words that need an explanation of their own."""
FENCE = re.compile(r"^( *)(```+|~~~+)(.*?)^\1\2[ \t]*$", re.M | re.S)
INLINE_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
LINK = re.compile(r"\]\(\s*<?([^()\s>]+(?:\([^()\s]*\)[^()\s>]*)?)>?(?:\s+\"[^\"]*\")?\s*\)")

HISTORY = re.compile(r"(CHANGELOG|LOG|.*_\d{4}-\d{2}-\d{2})\.md")
"""Pages with commands as they were typed once; these may no longer exist."""


def pages(root: Path) -> list[Path]:
    """Every Markdown file of the project, new ones too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [root / name for name in listed.stdout.splitlines() if (root / name).is_file()]


def current_pages(root: Path) -> list[Path]:
    return [page for page in pages(root) if not HISTORY.fullmatch(page.name)]


def prose(page: Path) -> str:
    """A page without its code."""
    return INLINE_CODE.sub("", FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", page.read_text()), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def load_script(root: Path, name: str):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, root / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_in_markdown_lead_somewhere(root):
    broken = []
    for page in pages(root):
        for target in LINK.findall(prose(page)):
            place, _, anchor = target.partition("#")
            if re.match(r"(https?|mailto):", place):
                continue
            found = page.parent / place if place else page
            if not found.exists():
                broken.append(f"{page.relative_to(root)}: {target}")
            elif anchor and found.suffix == ".md" and anchor not in anchors(found):
                broken.append(f"{page.relative_to(root)}: no heading #{anchor} in {place or page.name}")
    assert broken == []


def test_every_guide_is_named_in_the_index(root):
    index = (root / "docs" / "index.md").read_text()
    guides = {page.stem for page in (root / "docs").glob("*.md")} - {"index"}
    assert {name for name in guides if not re.search(rf"^{name}$", index, re.M)} == set()


def test_architecture_and_glossary_are_short(root):
    assert (root / "ARCHITECTURE.md").stat().st_size <= MAX_ARCHITECTURE
    assert len(re.findall(r"^\| \*\*", (root / "docs" / "glossary.md").read_text(), re.M)) <= MAX_GLOSSARY


def test_the_tree_in_architecture_is_the_repository(root):
    text = (root / "ARCHITECTURE.md").read_text()
    tree = re.search(r"```\n(src/.*?)```", text, re.S).group(1)
    named = {line.split()[0] for line in tree.splitlines() if line[:1].strip()}
    assert all((root / name).exists() for name in named), named
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if tracked.returncode == 0:
        folders = {f"{line.split('/')[0]}/" for line in tracked.stdout.splitlines() if "/" in line} - {".ci/"}
        assert folders <= named | {"src/"}, folders - named


def test_the_readme_is_short_and_says_how_fast_beside_what(root):
    text = (root / "README.md").read_text()
    assert len(text.split()) <= MAX_WORDS
    report = (root / "benchmarks" / "peers_2026-11-26.md").read_text()
    of_8b, of_2b = report.split("\n## 2B\n")
    fastest = {name: _figure(part, r"[^|]*: the fastest") for name, part in (("2B", of_2b), ("8B", of_8b))}
    with_ten = {name: _figure(part, "lookonce `shared`") for name, part in (("2B", of_2b), ("8B", of_8b))}
    row = re.search(r"^\| 1 \| ([\d.]+) \|[^|]*\| ([\d.]+)", report, re.M)
    with_one = {"2B": float(row[1]), "8B": float(row[2])}
    ten, one = ({name: fastest[name] / ms for name, ms in ours.items()} for ours in (with_ten, with_one))
    said = f"{ten['2B']:.0f} times (2B) and {ten['8B']:.0f} times (8B)", f"{one['2B']:.1f} and {one['8B']:.1f} times"
    assert all(words in text for words in said), said
    numbers = re.findall(r"[\d.,]+(?:x\b| times)", text)
    assert numbers == ["37 times", *(f"{ratio:.0f} times" for ratio in ten.values()), f"{one['8B']:.1f} times"]


def _figure(report, row):
    """Milliseconds a sample in a row of a report's table."""
    return float(re.search(rf"^\| {row} \| \**([\d.]+)", report, re.M)[1])


def test_the_figures_of_the_readme_are_those_of_its_report(root):
    readme = (root / "README.md").read_text()
    report = (root / "benchmarks" / "training_h200_2026-11-24.md").read_text()
    rows = re.findall(r"^\| [^|]* \| \**([\d.]+) ms\** \| \**([^|*]+?)\** \|$", readme, re.M)
    measured = re.findall(
        r"^\| (?:plain|liger|shared|fp8):[^|]*\|[^|]*\| ([\d.]+) \|(?:[^|]*\|){5} ([^|]+?) \|", report, re.M
    )
    assert rows == [(f"{float(ms):.1f}", epoch) for ms, epoch in measured] and len(rows) == 4
    plain, shared = float(measured[0][0]), float(measured[2][0])
    assert f"{plain / shared:.0f} times faster" in readme


def test_the_figures_of_the_benchmarks_page_are_in_the_reports_that_it_links(root):
    sections = [
        (re.findall(r"benchmarks/([\w.-]+\.md)", section), re.sub(r"\]\([^)]*\)|```.*?```", "", section, flags=re.S))
        for section in re.split(r"\n(?=## )", (root / "docs" / "benchmarks.md").read_text())
    ]
    missing, num_checked = [], 0
    for links, section in sections:
        reports = "".join((root / "benchmarks" / link).read_text() for link in set(links))
        known = [float(number) for number in re.findall(r"\d+\.\d+", reports)]
        for number in re.findall(r"\d+\.\d+", section) if links else ():
            near = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9  # a report may have more digits
            missing += [number] if all(abs(one - float(number)) > near for one in known) else []
            num_checked += 1
        missing += [time for time in re.findall(r"\d+ (?:h \d+ min|min \d+ s)", section) if time not in reports]
    assert missing == [] and num_checked > 100


def test_all_pages_have_one_time_for_an_epoch(root):
    [epoch] = re.findall(r"^\| \*\*lookonce\*\* \| [^|]* \| \*\*(.*?)\*\* \|", (root / "README.md").read_text(), re.M)
    for page in ("docs/afternoon.md", "docs/benchmarks.md", "slurm/README.md"):
        rows = re.findall(
            r"^\| (?:an epoch.*8B|an epoch of training|\*\*lookonce\*\*: packs).*$", (root / page).read_text(), re.M
        )
        assert rows and epoch in rows[0], page


def test_the_tokens_of_answers_are_those_of_the_arithmetic_beside_them(root):
    """Of 9 questions and 8 answers to each: `docs/grpo.md`."""
    text = (root / "docs" / "grpo.md").read_text()
    image, question, samples, num_questions = 500, 25, 8, 9
    rows = re.findall(r"^\| (\d+) tokens \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.M)
    assert len(rows) == 3
    for row in rows:
        length, *found = (int(cell.replace(",", "")) for cell in row)
        answers = samples * length
        by_question, tree = image + question + answers, image + num_questions * (question + answers)
        assert found == [num_questions * samples * (image + question + length), num_questions * by_question, tree]


def test_the_picture_is_what_training_draws_and_the_page_of_the_run_file_is_what_the_schema_says(root):
    drawn, page = load_script(root, "draw_pack").drawing(), load_script(root, "generate_run_file").page()
    assert (root / "docs" / "pack.svg").read_text() == drawn, "run: make docs-pages"
    assert "<title" in drawn and "<desc" in drawn
    assert (root / "docs" / "run-file.md").read_text() == page, "run: make docs-pages"


def test_the_page_of_guarantees_is_what_the_markers_of_the_tests_say(root):
    guarantees = load_script(root, "generate_guarantees")
    page = guarantees.page(root)
    before = (root / "docs" / "guarantees.md").read_text()
    assert guarantees.lost(before, page) == [], "a guarantee of the page has no test any more"
    assert before == page, "run: make docs-pages"


def test_a_guarantee_whose_marker_is_gone_is_noticed(root, monkeypatch):
    guarantees = load_script(root, "generate_guarantees")
    before = (root / "docs" / "guarantees.md").read_text()
    lost = "Shards are plain safetensors files."
    markers = guarantees.marked
    monkeypatch.setattr(guarantees, "marked", lambda source: [one for one in markers(source) if one != lost])
    assert guarantees.lost(before, guarantees.page(root)) == [lost]
    with pytest.raises(SystemExit, match=lost):
        guarantees.main()
    assert (root / "docs" / "guarantees.md").read_text() == before


def test_every_key_of_the_run_file_has_a_meaning():
    sections = {name: field for name, field in RunFile.model_fields.items() if name != "output"}
    fields = [field for section in sections.values() for field in section.annotation.model_fields.values()]
    assert len(fields) > 40 and all(field.description for field in [*fields, RunFile.model_fields["output"]])


def test_run_files_in_documents_have_keys_that_exist(root):
    checked = 0
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S):
            keys = yaml.safe_load(block)
            if "variants" in keys:
                StudyFile.model_validate(keys)
                continue
            for section, values in keys.items():
                assert section in RunFile.model_fields, f"{page.name}: {section}"
                if isinstance(values, dict):
                    known = RunFile.model_fields[section].annotation.model_fields
                    assert values.keys() <= known.keys(), f"{page.name}: {section}"
                    checked += len(values)
    assert checked > 8


def test_no_page_has_two_versions_of_a_merge(root):
    for page in [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "benchmarks").rglob("*.md")]:
        assert not re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(), re.M), page


def messages(root: Path) -> str:
    """All text in the code of the product, a text of several pieces in one, with {} for what is filled in."""
    found = []
    for folder in ("cache", "datasets", "eval", "src/lookonce", "train"):
        for path in (root / folder).rglob("*.py"):
            found += [_text(node) for node in ast.walk(ast.parse(path.read_text()))]
    return "\n".join(text for text in found if text)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_messages_in_troubleshooting_are_messages_of_the_code(root):
    known = messages(root)
    page = (root / "docs" / "troubleshooting.md").read_text()
    quoted = [cell for cell in re.findall(r"^\| (`[^|]+`) \|", page, re.M)]
    pieces = [piece.strip() for cell in quoted for piece in re.split(r"\.\.\.|…", cell.strip("`"))]
    assert len(quoted) > 20 and [piece for piece in pieces if piece not in known] == []


def test_the_version_is_that_of_the_newest_release(root):
    releases = re.findall(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)$", (root / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    assert releases[0] == (__version__, citation["date-released"]) and citation["version"] == __version__


PLACEHOLDERS = {"I/N": "1/2", "N": "1", "SECONDS": "1"}
"""What stands for a value in documents, and a value of that kind."""


def code_lines(page: Path) -> list[tuple[str, bool]]:
    """The lines of a page's code blocks, continued ones joined, and its inline code, which may name a command only."""
    text = page.read_text()
    blocks = "\n".join(found.group(3).partition("\n")[2] for found in FENCE.finditer(text)).replace("\\\n", " ")
    inline = [" ".join(code.split()) for _, code in INLINE_CODE.findall(FENCE.sub("", text))]
    return [(line.strip(), True) for line in blocks.splitlines()] + [(code, False) for code in inline]


def alternatives(words: list[str]) -> list[list[str]]:
    """`cache plan|build` are two commands; RUN.yaml|CACHE is one argument."""
    split = next((n for n, word in enumerate(words) if re.fullmatch(r"[a-z]+(\|[a-z]+)+", word)), None)
    if split is None:
        return [words]
    return [[*words[:split], choice, *words[split + 1 :]] for choice in words[split].split("|")]


def lookonce_commands(page: Path) -> list[tuple[list[str], bool]]:
    """The words after `lookonce` of every command on a page, and whether it must be a whole one."""
    found = []
    for line, whole in code_lines(page):
        if match := re.match(r"(?:\.venv/bin/)?(?:lookonce|(?:torchrun|python) .*-m lookonce)(?: (.*))?$", line):
            words = [PLACEHOLDERS.get(word, word) for word in shlex.split(match[1] or "", comments=True)]
            words = list(itertools.takewhile(lambda word: word not in ("&&", ">"), words))
            found += [([word for word in choice if word != "..."], whole) for choice in alternatives(words)]
    return found


def parse(words: list[str], whole: bool) -> None:
    """Parse a command as the command line does, without running it; paths need not exist.

    Raises:
        click.UsageError: there is no such command, option or value, or a whole command lacks an argument.
    """
    command, context = main, click.Context(main, info_name="lookonce", **main.context_settings)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, command, words = command.resolve_command(context, words)
        context = click.Context(command, context, name)
    try:
        parsed = command.make_context(context.info_name, words, context.parent) if words or whole else context
    except click.exceptions.Exit:  # --help, --version
        return
    except (click.MissingParameter, click.BadOptionUsage):
        if whole:
            raise
        return
    except click.BadParameter as error:
        if not isinstance(error.param and error.param.type, click.Path):
            raise
        return
    for assignment in parsed.params.get("assignments", ()):
        name = assignment.partition("=")[0]
        section, _, key = name.partition(".")
        known = RunFile.model_fields[section].annotation.model_fields if section in RunFile.model_fields and key else {}
        if key not in known and name not in RunFile.model_fields:
            raise click.UsageError(f"no key {name}")


def test_commands_in_documents_parse(root):
    wrong, number = [], 0
    for page in current_pages(root):
        for words, whole in lookonce_commands(page):
            number += 1
            try:
                parse(list(words), whole)
            except click.UsageError as error:
                wrong.append(f"{page.relative_to(root)}: lookonce {' '.join(words)}: {error.format_message()}")
    assert wrong == [] and number > 100


@pytest.mark.parametrize(
    "line",
    [
        *("lookonce cache pack run.yaml", "lookonce train run.yaml --resumes", "lookonce train", "lookonce nothing"),
        *("torchrun -m lookonce train run.yaml --ways", "lookonce eval runs/a --split all"),
        "lookonce train run.yaml --set train.epoch=3",
    ],
)
def test_commands_that_do_not_exist_are_found(tmp_path, line):
    page = tmp_path / "page.md"
    page.write_text(f"```sh\n{line}   # a comment\n```\n")
    [(words, whole)] = lookonce_commands(page)
    with pytest.raises(click.UsageError):
        parse(words, whole)


def test_make_targets_and_scripts_in_documents_exist(root):
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    lines = [(page, line) for page in current_pages(root) for line, _ in code_lines(page)]
    asked = {(page.name, name) for page, line in lines for name in re.findall(r"(?:^|&& )make ([a-z-]+)", line)}
    script = r"(?:^| )((?:slurm/(?!site)|benchmarks/(?=[a-z])|docs/)[\w./-]+\.\w+)"
    scripts = {name for _, line in lines for name in re.findall(script, line)}
    assert len(asked) > 10 and {one for one in asked if one[1] not in targets} == set()
    assert len(scripts) > 4 and {name for name in scripts if not (root / name).exists()} == set()

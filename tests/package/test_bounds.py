"""Bounds of pyproject.toml: all extras resolve for each Python, with the lowest and with the newest allowed versions.

Resolving reads metadata only, also for Pythons that are not installed. Only wheels count: what pip would have to
compile fails on most machines. On a newer Python the lowest version with a wheel may be higher than the bound.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from package.programs import resolve
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PYTHONS = ("3.11", "3.12", "3.13", "3.14")


@pytest.fixture(scope="module")
def project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("versions", ["lowest-direct", "highest"])
def test_all_extras_resolve(root: Path, project: dict, python: str, versions: str):
    found = resolve(root, python, versions)
    wanted = map(Requirement, sum(project["optional-dependencies"].values(), project["dependencies"]))
    for requirement in wanted:
        assert found[canonicalize_name(requirement.name)] in requirement.specifier


def test_every_lower_bound_can_be_reached_on_the_oldest_python(root: Path, project: dict):
    """A bound below what the other packages allow is one that no test has ever seen."""
    found = resolve(root, PYTHONS[0], "lowest-direct")
    for requirement in map(Requirement, sum(project["optional-dependencies"].values(), project["dependencies"])):
        [bound] = [one.version for one in requirement.specifier if one.operator == ">="]
        reached = found[canonicalize_name(requirement.name)]
        assert Version(reached).release[: len(Version(bound).release)] == Version(bound).release, (bound, reached)


def test_the_pythons_are_those_of_the_metadata(project: dict):
    named = {line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line}
    assert named == {*PYTHONS} and project["requires-python"] == f">={PYTHONS[0]}"
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in PYTHONS

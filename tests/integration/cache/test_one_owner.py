"""A cache has any number of users or one owner: repair and garbage collection need it for themselves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from lookonce.cache.maintenance.gc import collect_garbage
from lookonce.cache.maintenance.staging import stage
from lookonce.cache.maintenance.verify import repair, verify
from lookonce.cache.store.claims import CLAIMS, OWNER, USES
from lookonce.cache.store.shards import shard_path
from lookonce.claim_file import EXPIRY_S, Process
from lookonce.errors import CacheError
from lookonce.run.open import TO_BUILD, OpenRun, open_run

pytestmark = pytest.mark.guarantee(
    "No command changes a cache that another live process uses, here or on another machine; a killed process "
    "frees the cache."
)

USERS = {
    "build": "lookonce.cache.build.worker:_Build.run",
    "plan": "lookonce.cache.build.progress.ensure_plan",
    "stage from": "lookonce.cache.maintenance.staging.copy_small_files",
    "stage to": "lookonce.cache.maintenance.staging.copy_small_files",
    "train": "lookonce.train.train._notes",
    "eval": "lookonce.eval.run.load_untuned",
}
OWNERS = {
    "repair": "lookonce.cache.maintenance.verify.remove_broken_plan",
    "gc leftovers": "lookonce.claim_file:FolderClaim.is_lost",
    "gc cache": "lookonce.claim_file:FolderClaim.is_lost",
}
"""Commands that use a cache, or own it, each with a function in which it has its claim."""


@dataclass
class Site:
    """A cache that several commands use, with a shard that a killed worker left."""

    folder: Path
    cache: Path
    other: Path
    """Another copy of the cache, to stage from."""
    inputs: OpenRun

    def words(self, command: str) -> tuple[str, ...]:
        """The command line."""
        return {
            "build": ("cache", "build", "run.yaml"),
            "plan": ("cache", "plan", "run.yaml", "--pilot", "0", "--write"),
            "stage from": ("cache", "stage", str(self.cache), "elsewhere"),
            "stage to": ("cache", "stage", str(self.other), str(self.cache.parent)),
            "train": ("train", "run.yaml"),
            "eval": ("eval", "run.yaml", "--untuned"),
            "repair": ("cache", "repair", "run.yaml"),
            "gc leftovers": ("cache", "gc", str(self.cache), "--delete"),
            "gc cache": ("cache", "gc", str(self.cache), "--delete", "--cache", self.cache.name),
        }[command]

    def run(self, command: str) -> object:
        """Run a command in this process."""
        return {
            "build": lambda: self.inputs.build(),
            "plan": lambda: self.inputs.write_plan(),
            "stage from": lambda: stage(self.cache, self.folder / "elsewhere"),
            "stage to": lambda: stage(self.other, self.cache.parent),
            "repair": lambda: repair(self.cache, self.inputs.fingerprint, self.inputs.images),
            "gc leftovers": self._delete_leftovers,
            "gc cache": lambda: collect_garbage(self.cache.parent, delete=True, cache_id=self.cache.name),
        }[command]()

    def _delete_leftovers(self) -> None:
        report = collect_garbage(self.cache.parent, delete=True)
        assert bool(report.deleted) != bool(report.in_use)
        if report.in_use:
            assert "kept leftovers: " in report.text()
            raise CacheError(report.in_use[0])

    def contents(self) -> dict[Path, bytes]:
        paths = (path for path in self.cache.rglob("*") if path.is_file() and path.parent.name != CLAIMS)
        return {path: path.read_bytes() for path in paths}


@pytest.fixture
def site(tmp_path: Path, make_run, built) -> Site:
    run = make_run(train={"steps": 1}, eval={"max_new_tokens": 1})
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    unused = shutil.ignore_patterns(USES, CLAIMS)
    cache = shutil.copytree(built.folder, tmp_path / "caches" / built.folder.name, ignore=unused)
    other = shutil.copytree(built.folder, tmp_path / "other" / built.folder.name, ignore=unused)
    shutil.copy(shard_path(cache, "shard-00000"), shard_path(cache, "shard-00099"))
    return Site(tmp_path, cache, other, open_run(run, TO_BUILD))


FUNCTIONS = ("build", "plan", "stage from", "stage to", *OWNERS)
PAIRS = [(holder, [*OWNERS, *([holder] if "stage" in holder else [])]) for holder in USERS] + [
    (holder, list(FUNCTIONS)) for holder in OWNERS
]


@pytest.mark.parametrize(("holder", "refused"), PAIRS)
def test_of_two_commands_on_a_cache_the_later_is_refused_if_one_needs_it_for_itself(site, paused, holder, refused):
    process = paused((USERS | OWNERS)[holder], *site.words(holder))
    name = f"lookonce {' '.join(site.words(holder)[:2])}" if "cache" in site.words(holder) else f"lookonce {holder}"
    before = site.contents()
    for command in refused:
        named = rf"is in use by `{name}`: process {process.pid} on \S+, since "
        with pytest.raises(CacheError, match=rf"{named}|is used by {site.folder}/run;"):
            site.run(command)
        assert site.contents() == before, command
    for command in set(FUNCTIONS) - set(refused):
        site.run(command)
    paused.go_on()
    assert process.wait() == 0, process.error
    assert [path.read_text().strip() for path in site.cache.rglob(f"{CLAIMS}/*.json")] == []
    assert holder == "gc cache" or verify(site.cache).problems == []


@pytest.mark.parametrize(("holder", "command"), [("build", "repair"), ("repair", "build")])
def test_a_killed_process_frees_a_cache_at_once(site, paused, holder, command):
    process = paused((USERS | OWNERS)[holder], *site.words(holder))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    site.run(command)
    site.run("gc leftovers")
    assert not list((site.cache / CLAIMS).iterdir())


@pytest.mark.parametrize(
    ("file", "refused"), [(f"user-{0:032}.json", OWNERS), ("shard-00042.json", OWNERS), (OWNER, FUNCTIONS)]
)
def test_a_process_on_another_machine_holds_a_cache_until_its_heartbeat_expires(site, backdate, file, refused):
    there = replace(Process.this(), machine="elsewhere", host="node7", pid=4711)
    content = {"worker": asdict(there), "command": "lookonce cache build", "started": time.time()}
    (site.cache / CLAIMS).mkdir()
    (site.cache / CLAIMS / file).write_text(json.dumps(content))
    before = site.contents()
    for command in refused:
        with pytest.raises(CacheError, match=r"process 4711 on node7, since .*last sign of life \d s ago"):
            site.run(command)
        assert site.contents() == before, command
    backdate(site.cache / CLAIMS / file, EXPIRY_S + 1)
    for command in FUNCTIONS:
        site.run(command)
    assert not site.cache.exists()


def test_a_repair_that_lost_the_cache_while_suspended_changes_nothing(site, paused, backdate):
    shard = shard_path(site.cache, "shard-00001")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    process = paused("lookonce.cache.maintenance.verify.find_files", *site.words("repair"))
    os.kill(process.pid, signal.SIGSTOP)
    backdate(site.cache / CLAIMS / OWNER, EXPIRY_S + 1)
    repair(site.cache, site.inputs.fingerprint, site.inputs.images)
    shard.write_bytes(b"being built by another worker")
    before = site.contents()
    paused.go_on()
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait() == 1 and "has taken over" in process.error
    assert site.contents() == before

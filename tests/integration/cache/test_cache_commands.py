"""`lookonce cache ...`: exit codes, what is printed, and JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.rows import run
from support.small_caches import features_in, flip

from lookonce.cache.store.claims import CLAIMS, USES
from lookonce.cache.store.reader import VisionCache


def test_the_phases_report_json_on_stdout_alone(run_file):
    plan = run("cache", "plan", run_file, "--json")
    assert json.loads(plan.stdout)["num_images"] == 64
    built = json.loads(run("cache", "build", run_file, "--json").stdout)
    assert (built["num_encoded"], built["num_reused"]) == (64, 0)
    again = run("cache", "build", run_file)
    assert "nothing new encoded, 64 of 64 images reused" in again.stdout
    assert json.loads(run("status", run_file, "--json").stdout)["cache"]["report"]["num_done"] == 64


@pytest.fixture
def run_file(make_run, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(make_run().to_yaml())
    return path


@pytest.fixture
def cache(run_file: Path, built: VisionCache) -> Path:
    """The folder of the run file's cache, built."""
    copy = run_file.parent / "caches" / built.folder.name
    return shutil.copytree(built.folder, copy, ignore=shutil.ignore_patterns(CLAIMS, USES))


def test_a_cache_is_verified_by_run_file_and_by_folder(run_file, cache):
    for words in ((run_file,), (cache,), (cache, "--level", "quick")):
        result = run("cache", "verify", *words)
        assert (result.exit_code, result.stderr) == (0, "") and "64 images in 2 shards" in result.stdout


def test_damage_is_found_and_repaired(run_file, cache):
    flip(cache / "shards" / "shard-00001.safetensors")
    result = run("cache", "verify", run_file)
    assert result.exit_code == 1 and f"repair it with: lookonce cache repair {run_file}" in result.stdout
    [problem] = json.loads(run("cache", "verify", cache, "--json").stdout)["problems"]
    assert problem["shard"] == "shard-00001" and Path(problem["file"]).exists()
    result = run("cache", "repair", run_file)
    assert result.exit_code == 0 and "removed 1 damaged shard (shard-00001)" in result.stdout
    assert "encoded 15 images" in result.stdout
    assert run("cache", "verify", run_file).exit_code == 0
    nothing = json.loads(run("cache", "repair", run_file, "--json").stdout)
    assert (nothing["repair"]["num_problems"], nothing["build"]) == (0, None)


def test_damage_that_cannot_be_repaired_exits_with_1_until_it_is_dropped(make_run, sample, tmp_path):
    """On images of its own: those of the sample are read by other tests meanwhile."""
    shutil.copytree(sample / "images", tmp_path / "images")
    data = {"train": str(sample / "test.jsonl"), "val": [], "test": [], "image_root": str(tmp_path)}
    run_file = tmp_path / "run.yaml"
    run_file.write_text(make_run(data=data).to_yaml())
    cache = Path(json.loads(run("cache", "build", run_file, "--json").stdout)["folder"])
    flip(cache / "shards" / "shard-00000.safetensors")
    key = next(iter(json.loads((cache / "receipts" / "shard-00000.json").read_text())["images"]))
    for file in json.loads(run("cache", "show", cache, key, "--json").stdout)["files"]:
        Path(file).unlink()
    result = run("cache", "repair", run_file)
    assert result.exit_code == 1 and f"were not found: {key}" in result.stdout
    result = run("cache", "repair", run_file, "--drop", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["repair"]["lost"] == [key]


def test_an_image_is_shown_by_its_file(run_file, cache, sample):
    path = sample / "images" / "frame-0026.jpg"
    shown = json.loads(run("cache", "show", run_file, path, "--json").stdout)
    assert (shown["state"], shown["files"], shown["checksum_ok"]) == ("encoded", [str(path)], True)
    assert shown["key"] in run("cache", "show", cache, shown["key"][:12]).stdout


def test_caches_are_listed_and_deleted_by_name(run_file, cache):
    for place in (run_file, cache, cache.parent):
        assert cache.name in run("cache", "gc", place).stdout
    assert run("cache", "gc", run_file, "--delete", "--cache", cache.name[:8]).exit_code == 0
    assert not cache.exists()


def test_a_cache_is_staged_whole_or_as_far_as_a_run_reads_it(run_file, cache, tmp_path):
    result = run("cache", "stage", run_file, tmp_path / "local", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["num_copied"] == 2
    assert "2 shards staged before" in run("cache", "stage", cache, tmp_path / "local", "--verify").stdout
    flip(cache / "shards" / "shard-00000.safetensors")
    assert run("cache", "stage", cache, tmp_path / "other").exit_code == 1


def test_a_written_plan_is_shared_by_workers(run_file):
    written = run("cache", "plan", run_file, "--pilot", 0, "--write")
    assert "to do     2 shards" in written.stdout and "--worker I/N" in written.stderr
    result = run("cache", "build", run_file, "--worker", "1/2", "--no-wait", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["num_encoded"] == 64


RANK = """
import os, sys
from lookonce.cli import main
from lookonce.run import open as module
real = module.find_images

def find_images(*arguments, trust_plan):
    print("reads the plan" if trust_plan else "hashes", file=sys.stderr)
    return real(*arguments, trust_plan=trust_plan)

module.find_images = find_images
main()
"""


@pytest.mark.guarantee("Processes that torchrun starts are workers of one cache; the first one hashes the images.")
def test_processes_of_torchrun_build_one_cache(run_file, built, preloaded, tmp_path):
    """Also if there are fewer shards than processes."""
    ranks = preloaded.start_ranks(4, RANK, "cache", "build", str(run_file), "--json", folder=tmp_path)
    assert [rank.wait() for rank in ranks] == [0] * 4, [rank.error for rank in ranks]
    report = json.loads(ranks[0].out)
    assert (report["num_wanted"], report["num_missing"], report["num_encoded"] + report["num_by_others"]) == (64, 0, 64)
    assert [rank.out for rank in ranks[1:]] == [""] * 3
    assert ["hashes" in rank.error for rank in ranks] == [True, False, False, False]
    assert features_in(Path(report["folder"])) == features_in(built.folder)
    done = preloaded.start_ranks(2, RANK, "cache", "build", str(run_file), "--worker", "0/2", folder=tmp_path)
    assert [rank.wait() for rank in done] == [2, 2] and "leave out --worker" in done[0].error


@pytest.mark.parametrize("number", ["3", "3/2", "-1/2", "0/0", "1/2/3", "a/b", ""])
def test_a_worker_is_given_as_i_of_n(run_file, number):
    result = run("cache", "build", run_file, "--worker", number)
    assert result.exit_code == 2 and "0 <= I <= N and N >= 1, for example 3/8" in result.stderr

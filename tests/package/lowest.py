"""Run the unit tests with the lowest versions that pyproject.toml allows: python tests/package/lowest.py FOLDER [TEST]

Makes an environment in FOLDER for the Python that runs this. torch is the one of this environment: each other version
is some gigabytes, and only its bounds are resolved (test_bounds.py).
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from package.programs import resolve, run  # noqa: E402


def main() -> int:
    folder, tests = Path(sys.argv[1]).absolute(), sys.argv[2:] or ["tests/unit"]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    pins = resolve(ROOT, python, "lowest-direct", {"torch": version("torch")})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lowest.txt").write_text("".join(f"{name}=={number}\n" for name, number in pins.items()))
    uv, program = [sys.executable, "-m", "uv"], folder / "venv" / "bin" / "python"
    run(*uv, "venv", "--clear", "--python", sys.executable, folder / "venv", folder=ROOT)
    run(*uv, "pip", "install", "--python", program, "-r", folder / "lowest.txt", folder=ROOT)
    run(*uv, "pip", "install", "--python", program, "--no-deps", "--editable", ROOT, folder=ROOT)
    print(f"{len(pins)} packages in their lowest versions, torch {pins['torch']}: {folder / 'lowest.txt'}", flush=True)
    parallel = ["--numprocesses", "auto", "--maxprocesses", "8", "--dist", "loadfile"]
    return subprocess.run([program, "-m", "pytest", *parallel, *tests], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

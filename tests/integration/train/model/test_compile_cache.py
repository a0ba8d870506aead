"""What one process compiled, another one finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import Preloaded

SCRIPT = """
import json, sys, types
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from lookonce.train.model.compile import CompileCache, for_all_lengths

folder, notes = Path(sys.argv[1]), []
program = types.ModuleType("program")
program.torch = torch
modules = {**sys.modules}
if sys.argv[2] == "b":  # as in a program that imports multiprocessing and then torch
    sys.modules.clear()
    sys.modules.update({"program": program, **modules})
cache = CompileCache(folder / "compiler", folder / "config.json", notes.append)
cache.load()
product = torch.compile(lambda one, other: (one @ other).T, dynamic=True)  # no kernel for which C++ is compiled
weight = torch.nn.Parameter(torch.eye(8))  # with static sizes, as the weights of a layer
with for_all_lengths():
    product(torch.ones(16, 8), weight).sum().backward()
cache.save()
print(json.dumps([weight.grad.sum().item(), counters["aot_autograd"], counters["inductor"], notes]))
"""


def compile_in_a_process(
    preloaded: Preloaded, folder: Path, machine: str
) -> tuple[float, dict[str, int], dict[str, int], list[str]]:
    """The result, PyTorch's counters and the notes of a process on a machine with a compiler folder of its own."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder / machine)}
    (folder / "program.py").write_text(SCRIPT)  # the compiler's keys have the hash of the source file
    process = preloaded.start(SCRIPT, str(folder), machine, folder=folder, name="program.py", **variables)
    assert process.wait() == 0, process.error
    return json.loads(process.out)


@pytest.mark.guarantee(
    "Files of compiled code that are damaged, or of another user, device, version or model, never reach the compiler."
)
@pytest.mark.guarantee("A process reuses the code that another process compiled.")
def test_a_process_finds_what_another_one_compiled_beside_a_damaged_file(preloaded, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result, graphs, kernels, notes = compile_in_a_process(preloaded, tmp_path, "a")
    assert (graphs["autograd_cache_miss"], kernels["fxgraph_cache_miss"]) == (1, 2)
    assert notes[0] == "compiled graphs: 1, 0 of them from earlier processes" and notes[1].startswith("kept ")

    (path,) = (tmp_path / "compiler").glob("*")
    damaged = path.with_name(path.name.replace("-", "-0"))
    damaged.write_bytes(path.read_bytes()[:-1] + b"X")
    again, graphs, kernels, notes = compile_in_a_process(preloaded, tmp_path, "b")
    assert again == result and (graphs["autograd_cache_hit"], kernels["fxgraph_cache_hit"]) == (1, 2)
    assert notes == [
        f"removed {damaged}, which is damaged; compiling its code again",
        "compiled graphs: 1, 1 of them from earlier processes",
    ]
    assert [*(tmp_path / "compiler").glob("*")] == [path]

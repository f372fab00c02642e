"""What one process compiled, another loads: nothing is compiled anew, numbers are its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
from archsearch import execution

@torch.library.custom_op("made_up::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

double.register_fake(torch.empty_like)

def caches(constant, source):
    counters.clear()
    constant = torch.full((4,), constant)
    if source:
        execution.source_hash = lambda: source

    def gradient(x):
        x = x.detach().requires_grad_()
        loss = ((x.sin() + double(x.detach())) * constant * x).sum()
        return loss.detach(), *torch.autograd.grad(loss, [x])

    x = torch.arange(4.0)
    found, wanted = execution.compiled(gradient, x)(x), gradient(x)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    return {name[14:]: n for name, n in counters["inductor"].items() if "fxgraph_cache" in name}

print(json.dumps([caches(*one) for one in json.loads(sys.argv[1])]))
"""


def test_a_second_process_compiles_nothing_anew(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def caches(*compiled: tuple[float, str]) -> list[dict[str, int]]:
        command = [sys.executable, "-c", PROGRAM, json.dumps(compiled)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        found: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
        return found

    assert caches((1.0, "")) == [{"miss": 1}]
    # A tensor that the trace captured is an argument of what is cached, not a part of it.
    second = caches((1.0, ""), (3.0, ""), (1.0, "kernels of another source"))
    assert second == [{"hit": 1}, {"hit": 1}, {"miss": 1}]

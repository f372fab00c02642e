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

constant = torch.full((4,), float(sys.argv[1]))
if sys.argv[2]:
    execution.source_hash = lambda: sys.argv[2]

@torch.library.custom_op("made_up::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

double.register_fake(torch.empty_like)

def gradient(x):
    x = x.detach().requires_grad_()
    loss = ((x.sin() + double(x.detach())) * constant * x).sum()
    return loss.detach(), *torch.autograd.grad(loss, [x])

x = torch.arange(4.0)
found, wanted = execution.compiled(gradient, x)(x), gradient(x)
caches = {name: n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache")}
for one, other in zip(found, wanted, strict=True):
    torch.testing.assert_close(one, other)
print(json.dumps(caches))
"""


def test_a_second_process_compiles_nothing_anew(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def caches(constant: float, source: str = "") -> dict[str, int]:
        command = [sys.executable, "-c", PROGRAM, str(constant), source]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
        return found

    assert caches(1.0) == {"fxgraph_cache_miss": 1}
    assert caches(1.0) == {"fxgraph_cache_hit": 1}
    # A tensor that the trace captured is an argument of what is cached, not a part of it.
    assert caches(3.0) == {"fxgraph_cache_hit": 1}
    assert caches(1.0, "kernels of another source") == {"fxgraph_cache_miss": 1}

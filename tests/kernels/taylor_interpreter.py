"""Runs the Taylor programs in Triton's interpreter, so that tests need no GPU.

    TRITON_INTERPRET=1 python taylor_interpreter.py CALLS RESULTS

Triton reads that variable when it is imported, hence a process of its own. CALLS is a file of
torch.save: a list of dicts, each with the name of a function here and what it is given. RESULTS
gets a list of what they returned.
"""

import sys
from typing import Any

import torch
from archsearch_kernels import taylor_linear_attention as taylor
from archsearch_kernels.taylor_linear_attention import launches, layout, shapes, short
from archsearch_kernels.taylor_linear_attention import triton as ops
from torch import Tensor
from torch.func import vmap

from archsearch.registry import load_mixer, make_config

Named = dict[str, Tensor]


def cut(programs: int, part_chunks: int, pairs: int) -> None:
    """How many programs fill a card, how short a part may be, and up to where pairs are read."""
    shapes._PROGRAMS, shapes._PART_CHUNKS, ops.LONGEST_PAIRS = programs, part_chunks, pairs


def results(tensors: Named, weights: Named, options: dict[str, Any]) -> Named:
    """Outputs, and the gradient of every tensor for given gradients of the outputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    found = taylor.taylor_linear_attention(**leaves, **options, backend="triton")
    return with_gradients(
        dict(zip(("y", "memory", "normaliser"), found, strict=True)), leaves, weights
    )


def with_gradients(found: dict[str, Any], leaves: Named, weights: Named) -> Named:
    outputs = {name: y for name, y in found.items() if y is not None}
    gradients = torch.autograd.grad(
        list(outputs.values()), list(leaves.values()), [weights[name] for name in outputs]
    )
    named = {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {name: y.detach() for name, y in outputs.items()} | named


def attention(
    tensors: Named, weights: Named, options: dict[str, Any], cuts: tuple[int, int, int]
) -> Named:
    cut(*cuts)
    return results(tensors, weights, options)


def planted(tensors: Named, weights: Named, options: dict[str, Any], cuts: tuple[int, int, int],
            name: str, value: float) -> Named:  # fmt: skip
    """With a table of the programs changed by a factor."""
    cut(*cuts)
    right = layout.tables

    def wrong(*given: Any) -> Any:
        table = right(*given)
        return table._replace(**{name: getattr(table, name) * value})

    launches.tables = wrong
    try:
        return results(tensors, weights, options)
    finally:
        launches.tables = right


def planted_short(value: float, **given: Any) -> Named:
    """With linear terms of pairs changed by a factor."""
    right = short._constants

    def wrong(*sizes: Any) -> dict[str, Any]:
        constants = right(*sizes)
        return constants | {"ROOT": constants["ROOT"] * value}

    short._constants = wrong
    try:
        return attention(**given)
    finally:
        short._constants = right


def undescribed(**given: Any) -> Named:
    """Without descriptors, though the copy engine could read the inputs."""
    launches.DESCRIBES = False
    try:
        return attention(**given)
    finally:
        launches.DESCRIBES = True


def prefix(
    tensors: Named, weights: Named, options: dict[str, Any], cuts: tuple[int, int, int]
) -> Named:
    cut(*cuts)
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    found = taylor.prefix_state(**leaves, **options, backend="triton")
    return with_gradients(dict(zip(("memory", "normaliser"), found, strict=True)), leaves, weights)


def steps(tensors: Named) -> Named:
    """Outputs of one token after the other, from nothing, and the state that is left."""
    q, k, v = tensors.values()
    B, T, H, K = k.shape
    F = 1 + K + K * (K + 1) // 2
    memory, normaliser = torch.zeros(B, H, F, v.shape[-1]), torch.zeros(B, H, F)
    y = [
        taylor.step(q[:, t], k[:, t], v[:, t], memory, normaliser, backend="triton")
        for t in range(T)
    ]
    return {"y": torch.stack(y, 1), "memory": memory, "normaliser": normaliser}


def opcheck(tensors: Named) -> Named:
    """torch's own check of each op: schema, fake, autograd, traced."""
    q, k, v, memory, normaliser = tensors.values()
    exists = torch.ones(k.shape[:2], dtype=torch.bool)
    length = torch.tensor([3] * len(k))
    for state in ((None, None), (memory, normaliser)):
        leaves = [None if x is None else x.detach().requires_grad_() for x in (q, k, v, *state)]
        for keeps in (False, True):
            torch.library.opcheck(ops.forward, (*leaves[:3], exists, *leaves[3:], keeps))
    at = torch.tensor([[3, 0, 6]] * len(k))
    for queries, places in ((q, None), (q[:, :3], at)):
        leaves = [x.detach().requires_grad_() for x in (queries, k, v)]
        torch.library.opcheck(short.forward, (*leaves, exists, places))
        found = short.forward(queries, k, v, exists, places)
        torch.library.opcheck(
            short.backward, (queries, k, v, exists, places, *found, torch.ones_like(found[0]))
        )
    y, denominator, *_ = ops.forward(q, k, v, None, memory, normaliser, True)
    given = (q, k, v, None, memory, normaliser, y, denominator, v, memory, normaliser)
    torch.library.opcheck(ops.backward, given)
    torch.library.opcheck(
        ops.prefix, (k.detach().requires_grad_(), v.detach().requires_grad_(), exists, length)
    )
    torch.library.opcheck(ops.prefix_backward, (k, v, None, length, memory, normaliser))
    one = (q[:, 0], k[:, 0], v[:, 0], memory.clone(), normaliser.clone())
    torch.library.opcheck(ops.one_token, one)
    return {}


def mapped(tensors: Named, exists: Tensor) -> Named:
    """All members at once, ordinary backward; and each alone."""
    found: Named = {}
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}

    def member(given: Named) -> tuple[Tensor, ...]:
        prefix_memory, prefix_normaliser = taylor.prefix_state(
            given["k_BTHK"], given["v_BTHV"], exists_BT=exists, backend="triton"
        )
        y, memory, _ = taylor.taylor_linear_attention(
            **given,
            memory_BHFV=prefix_memory,
            normaliser_BHF=prefix_normaliser,
            exists_BT=exists,
            backend="triton",
        )
        assert memory is not None
        return y, memory

    ways = {
        "together": lambda: vmap(member)(leaves),
        "apart": lambda: tuple(
            torch.stack(x)
            for x in zip(
                *(member({n: x[m] for n, x in leaves.items()}) for m in range(3)), strict=True
            )
        ),
    }
    for name, way in ways.items():
        y, memory = way()
        gradients = torch.autograd.grad(y.square().sum() + memory.sum(), list(leaves.values()))
        found |= {f"{name} {i}": x.detach() for i, x in enumerate((y, memory, *gradients))}
    return found


def mapped_step(tensors: Named) -> Named:
    """A step of several members whose states are mapped in their second dimension."""
    q, k, v, memory, normaliser = (x.clone() for x in tensors.values())
    apart = [memory.clone(), normaliser.clone()]
    y = torch.stack([_one(q[m], k[m], v[m], apart, m) for m in range(len(q))])
    together = vmap(ops.one_token, in_dims=(0, 0, 0, 1, 1))(q, k, v, memory, normaliser)
    return {"y": y, "y together": together, "memory": apart[0], "memory together": memory}


def _one(q: Tensor, k: Tensor, v: Tensor, states: list[Tensor], m: int) -> Tensor:
    memory, normaliser = (x.select(1, m).contiguous() for x in states)
    y: Tensor = ops.one_token(q, k, v, memory, normaliser)
    states[0].select(1, m).copy_(memory)
    states[1].select(1, m).copy_(normaliser)
    return y


def mixer(name: str, fields: dict[str, Any], x: Tensor) -> Named:
    """A mixer whose kernels are these, and with those of torch: whole, in segments, by steps."""
    torch.manual_seed(0)
    module = load_mixer(name)(make_config(name, x.shape[-1], fields))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    found = {}
    for backend in ("triton", "chunked"):
        module.backends["linear_attention"] = backend
        state = module.init_state(len(x), x.shape[1], x.dtype, "cpu")
        first, state = module.mix(x[:, :9], state)
        steps = []
        for t in range(9, x.shape[1]):
            y, state = module.step(x[:, t], state)
            steps.append(y[:, None])
        whole = module(x)
        gradients = torch.autograd.grad(whole.square().sum(), list(module.parameters()))
        parts = (whole, torch.cat((first, *steps), 1), *state.values(), *gradients)
        found |= {f"{backend} {i}": part.detach() for i, part in enumerate(parts)}
    return found


def main() -> None:
    calls, found = sys.argv[1:]
    torch.save([globals()[call.pop("run")](**call) for call in torch.load(calls)], found)


if __name__ == "__main__":
    main()

"""Runs the programs of `residual_norm` and `embed_norm` in Triton's interpreter.

    TRITON_INTERPRET=1 python entry_interpreter.py CALLS RESULTS

Triton reads that variable when it is imported, hence a process of its own. CALLS is a file of
torch.save: a list of dicts with the family, the tensors and options of a call, the number of
members its tensors are stacked over (0: not stacked), and the gradients of its results. RESULTS
gets a list of lists of tensors: results, then gradients.
"""

import sys
from typing import Any

import torch
from archsearch_kernels import family
from archsearch_kernels.embed_norm import triton as embed_norm
from archsearch_kernels.residual_norm import triton as residual_norm
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from archsearch.arch import ArchSpec, ChannelSpec, LayerSpec
from archsearch.members import Member
from archsearch.model import ENTRY
from archsearch.population import Population
from archsearch.recipes import RECIPES


def results(call: dict[str, Any], backend: str = "triton") -> list[Tensor]:
    """What a call returns, and the gradients of its tensors."""
    names, options = list(call["tensors"]), dict(call["options"])
    keys = [options.pop("key")] if call["members"] and "key" in options else []

    def op(*given: Tensor) -> Any:
        own = dict(zip([*names, "key"][: len(given)], given, strict=True))
        return family(call["family"]).op(**own, **options, backend=backend)

    def run(*tensors: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        found = (vmap(op) if call["members"] else op)(*leaves, *keys)
        return [*(y.detach() for y in found), *torch.autograd.grad(found, leaves, call["weights"])]

    tensors = list(call["tensors"].values())
    if not call["traced"]:
        return run(*tensors)
    return make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)(*tensors)


def checked(call: dict[str, Any]) -> list[Tensor]:
    """torch's own checks of an op: schema, fake tensors, autograd. Nothing to return."""
    r, w = torch.randn(2, 5, 6), torch.randn(2, 6)
    tokens = torch.randint(0, 4, (5,))
    table, keys = torch.randn(2, 4, 6), torch.tensor([3, 4])
    for op, given in (
        (residual_norm.forward, (r, r + 1, w, w - 1)),
        (residual_norm.forward, (r, r + 1, w, None)),
        (residual_norm.backward, (r, r, r, w, True)),
        (embed_norm.forward, (tokens, table, w, w, keys, 0.25)),
        (embed_norm.forward, (tokens, table, w, None, None, 0.0)),
        (embed_norm.gradient, (tokens, r, keys, 0.25, 4)),
    ):
        leaves = [
            x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in given
        ]
        differs = op in (residual_norm.forward, embed_norm.forward)
        torch.library.opcheck(op, tuple(leaves if differs else given))
    return []


def wired(call: dict[str, Any]) -> list[Tensor]:
    """Losses and gradients of a population with these programs, then the same with references."""
    layers = tuple(LayerSpec(mixer=name, fields={}) for name in ("base_conv", "attention"))
    channel = ChannelSpec(kind="swiglu", ratio=2.0)
    arch = ArchSpec(width=20, layers=layers, channel_mixer=channel, norm=call["norm"])
    train = RECIPES["tiny"].train.model_copy(update={"embed_dropout": 0.1})
    members = (Member(1e-2, 0), Member(1e-3, 1))
    batch = (torch.arange(18).view(2, 9) % 7, torch.tensor([[8, 1], [0, 7]]), torch.arange(4))
    found: list[Tensor] = []
    for backend in ("triton", "reference"):
        backends = dict.fromkeys(ENTRY, backend)
        group = Population(arch, 32, members, train, 0, backends=backends).groups[0]
        state = (group.parameters, group.buffers)
        found += group.model.gradients(*state, *batch, None, torch.tensor([5, 2**40]))
    return found


def main() -> None:
    calls, found = sys.argv[1:]
    answers = []
    for call in torch.load(calls):
        residual_norm._PROGRAMS = call["programs"]
        embed_norm._SLICE, embed_norm._FEW = call["slice"], call["few"]
        for name, value in call["planted"].items():
            setattr(residual_norm, name, value)
            setattr(embed_norm, name, value)
        run = {"checks": checked, "wired": wired}.get(call["family"], results)
        answers.append(run(call))
    torch.save(answers, found)


if __name__ == "__main__":
    main()

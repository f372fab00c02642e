"""M copies of a model as functions of their parameters: hidden vectors, losses, gradients, hits.

The forward pass is a vmap over the plain module, the backward pass ordinary autograd of the summed
member losses, so a member's numbers are those of a model trained alone, whatever M is and whoever
the others are. Nothing here keeps a value. Knows nothing of optimisers or data.

Shape suffixes: M members; B batch, T tokens, K labelled positions, N = B K, D width, V vocabulary.
"""

import torch
from archsearch_kernels.head_loss import head_loss, hits
from torch import Tensor
from torch.func import functional_call, vmap

from archsearch.model import LanguageModel

Named = dict[str, Tensor]
"""Parameters or buffers of all members, by their names in the model."""


class GroupedModel:
    """What M copies of a model compute.

    Args:
        model: gives its code and its shapes; its own parameters are not read.
        dims: of each buffer, by name: None where one copy serves all members, else 0.
        head_backend: of the kernel family `head_loss`.
    """

    def __init__(
        self, model: LanguageModel, dims: dict[str, int | None], head_backend: str
    ) -> None:
        self.model, self.dims, self.head_backend = model, dims, head_backend

    def hidden(
        self,
        parameters: Named,
        buffers: Named,
        tokens_BT: Tensor,
        at_BK: Tensor,
        keys_M: Tensor | None,
    ) -> Tensor:
        """Final hidden vectors of every member at the labelled rows: hidden_MND."""

        def one(parameters: Named, buffers: Named, key: Tensor | None) -> Tensor:
            hidden_BKD: Tensor = functional_call(
                self.model, {**parameters, **buffers}, (tokens_BT, at_BK, key)
            )
            return hidden_BKD.flatten(0, 1)

        in_dims = (0, self.dims, None if keys_M is None else 0)
        grouped = vmap(one, in_dims=in_dims, randomness="different")
        hidden_MND: Tensor = grouped(parameters, buffers, keys_M)
        return hidden_MND

    def gradients(
        self,
        parameters: Named,
        buffers: Named,
        tokens_BT: Tensor,
        at_BK: Tensor,
        labels_N: Tensor,
        weights_N: Tensor | None,
        keys_M: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Loss of each member, and its gradient by every parameter."""
        leaves = {name: view.detach().requires_grad_() for name, view in parameters.items()}
        hidden_MND = self.hidden(leaves, buffers, tokens_BT, at_BK, keys_M)
        head_MVD = leaves[self.model.arch.head_matrix]
        loss_M = head_loss(
            hidden_MND,
            head_MVD,
            labels_N=labels_N,
            weights_N=weights_N,
            backend=self.head_backend,
        )
        return loss_M.detach(), *torch.autograd.grad(loss_M.sum(), list(leaves.values()))

    @torch.no_grad()
    def hits(
        self,
        parameters: Named,
        buffers: Named,
        tokens_BT: Tensor,
        at_BK: Tensor,
        labels_N: Tensor,
    ) -> Tensor:
        """Labelled rows that each member answers rightly: hits_M."""
        hidden_MND = self.hidden(parameters, buffers, tokens_BT, at_BK, None)
        head_MVD = parameters[self.model.arch.head_matrix]
        return hits(hidden_MND, head_MVD, labels_N, backend=self.head_backend)


def stack_buffers(
    models: list[LanguageModel], device: torch.device
) -> tuple[Named, dict[str, int | None]]:
    """Buffers of the members: one copy (vmap dimension None) where all agree, else stacked."""
    buffers: Named = {}
    dims: dict[str, int | None] = {}
    for name, first in models[0].named_buffers():
        each = [model.get_buffer(name) for model in models]
        same = all(torch.equal(first, other) for other in each)
        buffers[name] = (first if same else torch.stack(each)).to(device)
        dims[name] = None if same else 0
    return buffers, dims

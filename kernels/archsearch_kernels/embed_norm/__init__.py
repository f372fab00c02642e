"""Embed tokens, drop features, and norm: how a sequence enters a model.

    r_n = keep_n * table[token_n] / (1 - share)         x_n = norm(r_n), as in `residual_norm`

Tokens are the same for all members of a population, tables and keys are each member's own. A
feature is kept unless a hash of the key and of its place in the batch says otherwise (`dropout`).

The gradient of the table is a sum over the places of each token. `triton` sorts the tokens of the
call once for all members, and adds up the places of a token in a fixed order, those of a frequent
token by many programs: no atomics, no zeros to fill before, and a call repeats bit by bit.

Shape suffixes: N places (in any leading shape), V vocabulary, D width.
"""

import torch
from torch import Tensor

from archsearch_kernels.family import Call, Family, Sizes


def embed_norm(
    tokens_N: Tensor,
    table_VD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None = None,
    *,
    share: float = 0.0,
    key: Tensor | None = None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the residual stream r_ND and its norm x_ND, in the dtype of the table.

    Args:
        tokens_N: int64 in [0, V).
        bias_D: of a layer norm; None: an RMS norm.
        share: of the features that are dropped, if a key is given.
        key: scalar int64 tensor whose lower 32 bits decide which.
        backend: `reference` or, on CUDA, `triton`, which takes no fp64.

    Raises:
        LookupError: no such backend.
    """
    result: tuple[Tensor, Tensor] = FAMILY.load(backend)(
        tokens_N, table_VD, weight_D, bias_D, share, key if share > 0 else None
    )
    return result


def make_inputs(sizes: Sizes) -> Call:
    """Inputs of a check, with few tokens, so that most come often; a state stands for a layer norm
    and for dropped features."""
    generator = torch.Generator().manual_seed(sizes.seed)
    V, D = 11, sizes.head_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {"table_VD": normal(V, D), "weight_D": 1 + normal(D) / 4}
    options: dict[str, object] = {
        "tokens_N": torch.randint(0, V, (sizes.batch, sizes.tokens), generator=generator)
    }
    if sizes.state:
        tensors["bias_D"] = normal(D)
        options |= {"share": 0.3, "key": torch.tensor(2**40 + 7)}
    return Call(tensors, options)


FAMILY = Family(
    name="embed_norm",
    op=embed_norm,
    backends={
        name: f"archsearch_kernels.embed_norm.{name}:embed_norm" for name in ("reference", "triton")
    },
    make_inputs=make_inputs,
    auto={("cuda", dtype): "triton" for dtype in (torch.bfloat16, torch.float16)},
    only_on={"triton": "cuda"},
)

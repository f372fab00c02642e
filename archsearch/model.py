"""LanguageModel: an architecture and a vocabulary size become one module.

Embedding, pre-norm blocks `r = r + mixer(norm(r))` (then `r = r + channel(norm(r))` if there is a
channel mixer), a final norm, a head that is the embedding unless the architecture unties it, and no
positional embedding: mixers own their positions.
Embeddings start as N(0, 0.02); the declared residual projections are divided by sqrt(2 * layers),
as in GPT-2. Knows nothing of tasks, populations or optimisers.

What stands between the mixers is the kernel families `embed_norm` and `residual_norm`, whose
references are torch's embedding, addition and norms.

Shape suffixes: B batch, T tokens, K labelled positions, D width, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from archsearch_kernels import REFERENCE, resolve
from archsearch_kernels.embed_norm import embed_norm
from archsearch_kernels.head_loss import resolve_head
from archsearch_kernels.residual_norm import EPSILON, residual_norm
from torch import Tensor, nn
from torch.nn import functional as F

from archsearch.arch import ArchSpec
from archsearch.errors import PluginError
from archsearch.mixer import Mixer, State, rows
from archsearch.model_spec import Norm
from archsearch.registry import load_mixer

HEAD = "head_loss"
"""The kernel family that a population's head calls."""

ENTRY = ("embed_norm", "residual_norm")
"""Kernel families that stand between the mixers; they depend on the width alone."""

_INIT_STD = 0.02
ModelState = tuple[State, ...]
"""The state of each layer's mixer, in order of depth."""


class Block(nn.Module):
    """One layer: a mixer and, after it, a channel mixer if the architecture has one."""

    def __init__(self, width: int, mixer: Mixer, channel: Mixer | None, norm: Norm) -> None:
        super().__init__()
        self.norm = _make_norm(norm, width)
        self.mixer = mixer
        self.channel_norm = _make_norm(norm, width) if channel is not None else None
        self.channel = channel

    def mix_channels(self, r_D: Tensor) -> Tensor:
        """Add the channel mixer to a residual stream of any leading shape."""
        if self.channel is None or self.channel_norm is None:
            return r_D
        y_D: Tensor = self.channel(self.channel_norm(r_D))
        return r_D + y_D


class LanguageModel(nn.Module):
    """The trained and exported model.

    Args:
        embed_dropout: share of embedding features that a forward pass with a key sets to zero.

    Raises:
        PluginError, InfeasibleError: from the mixers of the architecture.
    """

    def __init__(self, arch: ArchSpec, vocab_size: int, embed_dropout: float = 0.0) -> None:
        super().__init__()
        self.arch = arch
        self.backends = dict.fromkeys(ENTRY, REFERENCE)
        self.vocab_size = vocab_size
        self.embed_dropout = embed_dropout
        self.embedding = nn.Embedding(vocab_size, arch.width)
        nn.init.normal_(self.embedding.weight, std=_INIT_STD)
        blocks = []
        for layer in arch.layers:
            mixer = load_mixer(layer.mixer)(layer.config(arch.width))
            config = arch.channel_mixer.config(arch.width)
            channel = load_mixer(arch.channel_mixer.kind)(config) if config is not None else None
            blocks.append(Block(arch.width, mixer, channel, arch.norm))
        self.blocks: nn.ModuleList = nn.ModuleList(blocks)
        self.norm = _make_norm(arch.norm, arch.width)
        if not arch.tied_head:
            self.head = nn.Linear(arch.width, vocab_size, bias=False)
            nn.init.normal_(self.head.weight, std=_INIT_STD)
        self._scale_residual_projections()

    @torch.no_grad()
    def _scale_residual_projections(self) -> None:
        scale = 1 / math.sqrt(2 * max(1, len(self.blocks)))
        for block in self.layers:
            for part in (block.mixer, block.channel):
                if part is not None:
                    for name in part.residual_projections:
                        part.get_parameter(name).mul_(scale)

    def use_backends(self, backends: Mapping[str, str]) -> None:
        """Have the model and every mixer call these backends; others keep the reference."""
        self.backends |= {name: backends[name] for name in ENTRY if name in backends}
        for mixer in self.modules():
            if isinstance(mixer, Mixer):
                known = {name: backends[name] for name in mixer.kernels if name in backends}
                mixer.backends |= known

    @property
    def layers(self) -> tuple[Block, ...]:
        """The blocks, in order of depth."""
        return tuple(block for block in self.blocks if isinstance(block, Block))

    def forward(
        self, tokens_BT: Tensor, at_BK: Tensor | None = None, dropout_key: Tensor | None = None
    ) -> Tensor:
        """Return the final hidden vectors: hidden_BTD, or hidden_BKD at the positions `at_BK`.

        Nothing after the last mixer looks across positions, so only the asked rows leave it.

        Args:
            at_BK: int64 positions in [0, T).
            dropout_key: a scalar int64 tensor; embedding dropout is applied only if it is given.
        """
        norms = [*(block.norm for block in self.layers), self.norm]
        r_BTD, x_BTD = self._enter(tokens_BT, norms[0], dropout_key)
        for block, following in zip(self.layers, norms[1:], strict=True):
            if following is self.norm and at_BK is not None:
                r_BTD, y_BTD = rows(r_BTD, at_BK), block.mixer.outputs_at(x_BTD, at_BK)
            else:
                y_BTD = block.mixer(x_BTD)
            if block.channel is not None and block.channel_norm is not None:
                r_BTD, x_BTD = self._add(r_BTD, y_BTD, block.channel_norm)
                y_BTD = block.channel(x_BTD)
            r_BTD, x_BTD = self._add(r_BTD, y_BTD, following)
        return x_BTD

    def _enter(
        self, tokens_BT: Tensor, norm: nn.Module, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream at its beginning, and normed."""
        return embed_norm(
            tokens_BT,
            self.embedding.weight,
            *_weights_of(norm),
            share=self.embed_dropout,
            key=key,
            backend=self.backends["embed_norm"],
        )

    def _add(self, r_BTD: Tensor, y_BTD: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """The residual stream after a mixer, and normed."""
        backend = self.backends["residual_norm"]
        return residual_norm(r_BTD, y_BTD, *_weights_of(norm), backend=backend)

    def logits(self, hidden_D: Tensor) -> Tensor:
        """Scores over the vocabulary, logits_V, for hidden vectors of any leading shape."""
        return F.linear(hidden_D, self.get_parameter(self.arch.head_matrix))

    def init_state(
        self, batch: int, context_len: int, dtype: torch.dtype, device: torch.device | str
    ) -> ModelState:
        """Return the empty state for sequences of up to `context_len` tokens."""
        return tuple(
            block.mixer.init_state(batch, context_len, dtype, device) for block in self.layers
        )

    def mix(self, tokens_BT: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Read a segment from any state; return hidden_BTD and the new state (old one kept)."""
        r_BTD = F.embedding(tokens_BT, self.embedding.weight)
        after = []
        for block, before in zip(self.layers, state, strict=True):
            y_BTD, new = block.mixer.mix(block.norm(r_BTD), before)
            r_BTD = block.mix_channels(r_BTD + y_BTD)
            after.append(new)
        return self.norm(r_BTD), tuple(after)

    def step(self, token_B: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Read one token; return logits_BV and the new state. The state passed in is spent."""
        r_BD = F.embedding(token_B, self.embedding.weight)
        after = []
        for block, before in zip(self.layers, state, strict=True):
            y_BD, new = block.mixer.step(block.norm(r_BD), before)
            r_BD = block.mix_channels(r_BD + y_BD)
            after.append(new)
        return self.logits(self.norm(r_BD)), tuple(after)


def resolve_backends(arch: ArchSpec, device_type: str, dtype: torch.dtype) -> dict[str, str]:
    """Answer `auto` once for every kernel family of an architecture: family -> backend.

    A family that several mixers call gets one backend, which all of them allow and can use. The
    head's is there too.

    Raises:
        PluginError: an unknown mixer, or a mixer that names an unknown family.
        InfeasibleError: fields that a mixer's own rules exclude.
    """
    allowed: dict[str, set[str]] = {}
    for mixer, config in _configs(arch):
        for name, backends in load_mixer(mixer).kernels.items():
            usable = {backend for backend in backends if config.can_use(name, backend)}
            allowed[name] = allowed.get(name, usable) & usable
    try:
        found = {name: resolve(name, device_type, dtype, allowed[name]) for name in sorted(allowed)}
    except LookupError as error:
        raise PluginError(f"architecture {arch.summary}: {error}") from error
    found |= {name: resolve(name, device_type, dtype) for name in ENTRY}
    return {**found, HEAD: resolve_head(device_type, dtype, arch.width)}


def _configs(arch: ArchSpec) -> Iterator[tuple[str, Mixer.Config]]:
    """Every mixer of an architecture, and the config that speaks for it: that of its layer."""
    for layer in arch.layers:
        config = layer.config(arch.width)
        yield from ((one.mixer, config) for one in layer.nested)
    channels = arch.channel_mixer.config(arch.width)
    if channels is not None:
        yield arch.channel_mixer.kind, channels


def _weights_of(norm: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a norm; an RMS norm has no bias."""
    weight, bias = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))
    return weight, bias


def _make_norm(kind: Norm, width: int) -> nn.Module:
    return nn.LayerNorm(width) if kind == "layernorm" else nn.RMSNorm(width, eps=EPSILON)

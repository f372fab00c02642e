"""History kept chunk by chunk as keys or in a memory: NAtS-L (Deng et al., arXiv:2602.03681).

Every token sees its own chunk through softmax attention and through a gated memory. Once a chunk of
C tokens is complete, a router decides for each group of heads what later tokens see of it:

    score = mean over the chunk of w . x_t       w: the difference of two rows     (eq. 8-9)
    score >= 0: its keys stay, and the memory becomes (prod alpha_t) S, where S
                was the memory before the chunk                                    (eq. 20)
    otherwise:  its keys go, and what it wrote stays in the memory

    S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,  y_t = S_t q_t  (eq. 18-19)
    z_t = softmax attention over the kept chunks and the own one                   (eq. 10-12)
    o_t = a_t RMSNorm(z_t) + b_t RMSNorm(y_t),   (a_t, b_t) = softmax(W q_t)       (eq. 21-22)

A token never feels the route of its own chunk, so the mean over a whole chunk shows it no future.
q, k and v are shared: a projection, `conv` taps, SiLU. The memory's q and k have length 1; softmax
heads, `split` of them cut from one memory's head, RMS-normalise theirs. alpha, beta and the gate of
the output are those of `gated_delta`. With `linear: mamba2` the memory is Mamba-2's, S_t = alpha_t
S_{t-1} + d_t v_t k_t^T, where d_t = softplus(W_d x_t + b) and alpha_t = exp(-exp(A) d_t).

The rows of the paper's table of ablations, besides `chunk` (64 there, and 128 in one row):

    Attn Out, GDN Out                 inside: softmax, inside: linear (operator in the own chunk)
    w/o LAttn Decay                   decay_through: false (none where a chunk is kept)
    w/o Attn Norm                     norm: joint (added first, then normalised)
    w/o Attn Weights                  weights: none
    Sigmoid Weights, Linear Weights   weights: sigmoid, weights: linear
    Weights From X                    weights_from: input (W x_t)

The hard route passes the gradient of sigmoid(score) straight through, which the authors' code does
and the paper leaves open: `route_gradient: selected` to the way taken only, as published, `both` to
both. For keys it is the derivative of z_t in the weight of the chunk's columns (eq. 15-16), for the
memory that of S on the line between its two outcomes (eq. 17).

The paper has no budget. Here `kv_share_max` and `max_kv_chunks` (0: none) are hard: of n chunks, a
group keeps at most kv_share_max n and at most max_kv_chunks; one too many goes into the memory,
whatever its score. First come, first served: to rank chunks is to know later ones, or to drop one
that is in neither place. n counts the chunks so far, so no output depends on what is to come.
`penalty` is soft: it adds to the loss, with target `kv_share_target` and the gradient as above,

    penalty * sum over groups of (share of complete chunks with score >= 0 - target)^2

where the share is over the batch. `forward` adds it by itself, once for a backward pass, unscaled:
it does not shrink with a loss that is divided later, and M copies whose losses are summed train as
M models. With a penalty, scores have a bias.

State: a cache for the context, or for the cap and the open chunk; the memory with and without that
chunk; a sum of scores; counts; a tail. `state_range` counts the cache as filled: no chunk kept,
kv_share_target of them (half, by default), all that may be. It starts as `gated_delta` does. Left
out: routes sampled by Gumbel noise, fewer key than value heads, saving work that is not selected.

Shape suffixes: B batch, T tokens, D model width, G groups, A softmax heads, I and U their key and
value sizes, C channels, J taps, P = J - 1 tokens carried in, W values of all heads.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from archsearch_kernels.added_loss import add_loss
from archsearch_kernels.chunk_routed import Rules, chunk_routed
from archsearch_kernels.chunk_routed.cache import slots_of, write, write_one
from archsearch_kernels.chunk_routed.routing import Past, Routes, decide, most_kept
from archsearch_kernels.norm import rms_norm, unit
from archsearch_kernels.precision import accumulator
from archsearch_kernels.rotary import rotate
from archsearch_kernels.short_conv import short_conv
from torch import Tensor, nn

from archsearch.mixer import Mixer, State, StateRange, StateTensor
from archsearch.space import Choice

INITIAL_DECAY = 1e-3
"""-log(alpha) at the start: half is forgotten after 700 tokens; `gated_delta` says why."""

CONV_NOISE = 0.1
"""Taps start within this of passing the current token on; random taps mix keys with neighbours."""

SAMPLES = 10_000
"""Most tokens of a context over which FLOPs are averaged."""

NAMED = {
    "linear": ("gated_delta", "mamba2"),
    "inside": ("both", "softmax", "linear"),
    "norm": ("separate", "joint"),
    "weights": ("softmax", "sigmoid", "linear", "none"),
    "weights_from": ("query", "input"),
    "route_gradient": ("selected", "both"),
}
"""What the fields of names may say."""


class Projected(NamedTuple):
    """Queries, keys and values of all heads (B, T, C), those of the softmax heads, and the tail."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_soft: Tensor
    k_soft: Tensor
    v_soft: Tensor
    tail: Tensor | None


class ChunkRouted(Mixer):
    """Each chunk of the past is kept in full or in a memory, as a router says."""

    @dataclass(frozen=True, kw_only=True)
    class Config(Mixer.Config):
        chunk: Annotated[int, Choice(16, 32, 64, 128, 256), "tokens routed together"] = 16
        heads: Annotated[int, Choice(1, 2, 4), "matrix memories"] = 2
        groups: Annotated[int, Choice(0, 1, 2), "routes of a chunk; 0: one for each head"] = 0
        split: Annotated[int, Choice(1, 2), "softmax heads cut from the head of a memory"] = 1
        head_dim: Annotated[int, Choice(8, 16, 32, 64), "key size of a memory"] = 32
        expand_v: Annotated[int, Choice(1, 2), "size of a value over the size of a key"] = 2
        conv: Annotated[int, Choice(0, 4), "taps of the convolution on q, k and v; 0: none"] = 4
        linear: Annotated[str, Choice("gated_delta", "mamba2"), "kind of memory"] = "gated_delta"
        rope: Annotated[bool, "rotate queries and keys of softmax heads by their position"] = False
        kv_share_max: Annotated[float, Choice(0.25, 0.5, 1.0), "most of the chunks kept"] = 1.0
        max_kv_chunks: Annotated[int, "most chunks kept; 0: no such limit"] = 0
        kv_share_target: Annotated[float, "share of chunks kept that the penalty pulls to"] = 0.5
        penalty: Annotated[float, "weight of the squared distance to the target; 0: none"] = 0.0
        inside: Annotated[str, "operators in the own chunk: both, softmax or linear"] = "both"
        decay_through: Annotated[bool, "the memory decays through chunks that are kept"] = True
        norm: Annotated[str, "separate: each operator's output; joint: their sum"] = "separate"
        weights: Annotated[str, "of the outputs: softmax, sigmoid, linear or none"] = "softmax"
        weights_from: Annotated[str, "what gives the weights: query or input"] = "query"
        route_gradient: Annotated[str, "of the way selected or of both"] = "selected"

        def __post_init__(self) -> None:
            for name in ("chunk", "heads", "split", "head_dim", "expand_v"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
            for name, allowed in NAMED.items():
                if (given := getattr(self, name)) not in allowed:
                    raise ValueError(f"{name} is '{given}'; it must be one of {', '.join(allowed)}")
            if self.inside == "softmax" and not self.decay_through:
                raise ValueError("inside is softmax, so decay_through must be true: else no decay")
            if self.conv < 0 or self.conv == 1:
                raise ValueError(f"conv is {self.conv}; it must be 0 or at least 2")
            if self.groups < 0 or self.heads % self.routes:
                raise ValueError(f"groups is {self.groups}; it must be 0 or divide {self.heads}")
            if self.head_dim % ((1 + self.rope) * self.split):
                raise ValueError(
                    f"split is {self.split}; it must divide head_dim {self.head_dim} (rope: half)"
                )
            for name in ("max_kv_chunks", "penalty"):
                if not 0 <= (number := getattr(self, name)) < math.inf:
                    raise ValueError(f"{name} is {number:g}; it must be 0 or more, and finite")
            most = self.kv_share_max if self.penalty else 1.0
            for name, limit in (("kv_share_max", 1.0), ("kv_share_target", most)):
                share, of = getattr(self, name), ", the kv_share_max" if limit < 1 else ""
                if not 0 <= share <= limit:
                    raise ValueError(f"{name} is {share:g}; it must be 0 to {limit:g}{of}")

        def canonical(self) -> Self:
            all_kept = not self.penalty and self.kv_share_target >= self.kv_share_max
            return replace(
                self,
                groups=0 if self.groups == self.heads else self.groups,
                weights_from="query" if self.weights == "none" else self.weights_from,
                kv_share_target=max(0.5, self.kv_share_max) if all_kept else self.kv_share_target,
            )

        @property
        def routes(self) -> int:
            """Decisions for each chunk."""
            return self.groups or self.heads

        @property
        def soft_heads(self) -> int:
            return self.heads * self.split

        @property
        def keys(self) -> int:
            """Numbers in the keys of all heads."""
            return self.heads * self.head_dim

        @property
        def values(self) -> int:
            """Numbers in the values of all heads."""
            return self.keys * self.expand_v

        @property
        def channels(self) -> int:
            """Channels of the convolution: queries, keys and values of all heads."""
            return 2 * self.keys + self.values

        def _cap(self, tokens: int) -> int:
            return most_kept(tokens // self.chunk, self.kv_share_max, self.max_kv_chunks)

        def slots(self, context_len: int) -> int:
            """Tokens the cache has room for: those that may be kept, and the open chunk."""
            return min(context_len, (self._cap(context_len) + 1) * self.chunk)

        def state_spec(self, context_len: int, dtype: torch.dtype) -> tuple[StateTensor, ...]:
            wide, slots, heads = accumulator(dtype), self.slots(context_len), self.soft_heads
            memory = (self.heads, self.head_dim * self.expand_v, self.head_dim)
            spec = (
                StateTensor("key", (slots, heads, self.keys // heads), dtype),
                StateTensor("value", (slots, heads, self.values // heads), dtype),
                StateTensor("written", memory, wide),
                StateTensor("spared", memory, wide),
                StateTensor("score", (self.routes,), wide),
                StateTensor("kept", (self.routes,), torch.int64),
                StateTensor("position", (), torch.int64),
            )
            tail = StateTensor("tail", (self.conv - 1, self.channels), dtype)
            return (*spec, tail) if self.conv else spec

        def state_range(self, context_len: int, dtype: torch.dtype) -> StateRange:
            most = sum(part.state_bytes for part in self.state_spec(context_len, dtype))
            token = (self.keys + self.values) * dtype.itemsize
            chunks = context_len // self.chunk
            kept = min(self.kv_share_target * chunks, self._cap(context_len))
            room, opened = self.slots(context_len), min(self.chunk, context_len)
            expected = min(room, opened + round(kept * self.chunk))
            return StateRange(
                most - (room - opened) * token, most - (room - expected) * token, most
            )

        def flops(self, context_len: int) -> int:
            gates = 2 if self.linear == "gated_delta" else 1
            projected = self.channels + 2 * self.values + gates * self.heads + self.routes
            weighed = self.keys if self.weights_from == "query" else self.d_model
            weights = 0 if self.weights == "none" else 4 * self.soft_heads * weighed
            taps = 2 * self.conv * self.channels
            # Written: decay 1, write 2, read 2, predict 2 if corrected. Spared: decay 1. Settle 3.
            updates = 8 + 2 * (self.linear == "gated_delta") + self.decay_through
            memory = updates * self.values * self.head_dim
            apart = context_len // SAMPLES + 1
            seen = [self.slots(token) for token in range(apart, context_len + 1, apart)]
            looks = round(2 * (self.keys + self.values) * sum(seen) / max(len(seen), 1))
            return 2 * self.d_model * projected + weights + taps + memory + looks

    config: Config
    kernels: ClassVar = {
        "chunk_routed": ("reference", "chunked"),
        "short_conv": ("reference", "triton"),
    }
    residual_projections: ClassVar = ("out.weight",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        delta, D, A = config.linear == "gated_delta", config.d_model, config.soft_heads
        self.qkv = nn.Linear(D, config.channels, bias=False)
        self.rates = nn.Linear(D, config.heads * (2 if delta else 1), bias=False)
        self.route = nn.Linear(D, config.routes, bias=config.penalty > 0)
        self.gate = nn.Linear(D, config.values, bias=False)
        self.out = nn.Linear(config.values, D, bias=False)
        if config.weights != "none":
            weighed = config.keys if config.weights_from == "query" else D
            self.mixing = nn.Linear(weighed, 2 * A, bias=False)
        for linear in self.children():
            assert isinstance(linear, nn.Linear)
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        if config.penalty:
            nn.init.zeros_(self.route.bias)
        self.soft_norm_weight = nn.Parameter(torch.ones(2, config.keys // A))
        norms = 2 if config.norm == "separate" else 1
        self.norm_weight = nn.Parameter(torch.ones(norms, config.values // A))
        # softplus(dt_bias) times exp(A_log) is the decay; in Mamba-2 the former is also a strength.
        start = INITIAL_DECAY if delta else 1.0
        self.A_log = nn.Parameter(torch.full((config.heads,), math.log(INITIAL_DECAY / start)))
        self.dt_bias = nn.Parameter(torch.full((config.heads,), math.log(math.expm1(start))))
        if config.conv:
            weight_CJ = torch.empty(config.channels, config.conv).uniform_(-CONV_NOISE, CONV_NOISE)
            weight_CJ[:, -1] += 1
            self.conv_weight = nn.Parameter(weight_CJ)

    def _project(self, x_BTD: Tensor, state: State | None) -> Projected:
        config, qkv_BTC, tail_BPC = self.config, self.qkv(x_BTD), None
        if config.conv:
            past, backend = None if state is None else state["tail"], self.backends["short_conv"]
            qkv_BTC, tail_BPC = short_conv(
                qkv_BTC, self.conv_weight, tail_BPC=past, silu=True, backend=backend
            )
        else:
            qkv_BTC = F.silu(qkv_BTC)
        parts = qkv_BTC.split((config.keys, config.keys, config.values), dim=-1)
        q, k, v = (part.unflatten(-1, (config.soft_heads, -1)) for part in parts)
        q, k = map(rms_norm, (q, k), self.soft_norm_weight.unbind())
        if config.rope:
            time_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
            position = time_T if state is None else state["position"][:, None] + time_T
            q, k = rotate(q, position), rotate(k, position)
        return Projected(parts[0], parts[1], parts[2], q, k, v, tail_BPC)

    def _rates(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return log(alpha) and the strength of a write per memory, in fp32 at least."""
        rates = self.rates(x_BTD).to(accumulator(x_BTD.dtype))
        step_BTH = F.softplus(rates[..., : self.config.heads] + self.dt_bias.to(rates.dtype))
        log_decay_BTH = -self.A_log.to(rates.dtype).exp() * step_BTH
        if self.config.linear == "mamba2":
            return log_decay_BTH, step_BTH
        return log_decay_BTH, rates[..., self.config.heads :].sigmoid()

    def _routes(self, x_BTD: Tensor, state: State | None) -> Routes:
        """Score the chunks, in fp32 at least, and decide about those that are complete."""
        config, wide = self.config, accumulator(x_BTD.dtype)
        return decide(
            F.linear(x_BTD.to(wide), self.route.weight.to(wide)),
            self.route.bias.to(wide) if config.penalty else None,
            None if state is None else Past(state["score"], state["kept"], state["position"]),
            chunk=config.chunk,
            share=config.kv_share_max,
            most=config.max_kv_chunks,
            gradient=config.route_gradient,
        )

    def _mix(
        self, x_BTD: Tensor, on: Projected, routes: Routes, past: State, cached: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output and both memories; `cached`: a lone token lies in the cache already."""
        config, delta = self.config, self.config.linear == "gated_delta"
        q, k, v = (x.unflatten(-1, (config.heads, -1)) for x in (on.q, on.k, on.v))
        y_BT2W, written, spared = chunk_routed(
            unit(q),
            unit(k),
            v,
            on.q_soft,
            None if cached else on.k_soft,
            *self._rates(x_BTD),
            routes.to_keys,
            routes.to_memory,
            rules=Rules(config.chunk, config.inside, config.decay_through, delta),
            written_BHVK=past.get("written"),
            spared_BHVK=past.get("spared"),
            key_BSAI=past.get("key"),
            value_BSAU=past.get("value"),
            kept_BG=past.get("kept"),
            offset_B=past["position"] % config.chunk if past else None,
            backend=self.backends["chunk_routed"],
        )
        return self._merge(x_BTD, on.q, y_BT2W), written, spared

    def _merge(self, x_BTD: Tensor, q_BTC: Tensor, y_BT2W: Tensor) -> Tensor:
        """Normalise the two outputs, weigh, add, gate and project them."""
        config = self.config
        y_BT2AU = y_BT2W.unflatten(-1, (config.soft_heads, -1))
        if config.norm == "separate":
            y_BT2AU = rms_norm(y_BT2AU, self.norm_weight[:, None])
        if config.weights != "none":
            source = q_BTC if config.weights_from == "query" else x_BTD
            weight = self.mixing(source).unflatten(-1, (2, config.soft_heads, 1))
            if config.weights != "linear":
                weight = weight.softmax(2) if config.weights == "softmax" else weight.sigmoid()
            y_BT2AU = y_BT2AU * weight
        y_BTAU = y_BT2AU.sum(2)
        if config.norm == "joint":
            y_BTAU = rms_norm(y_BTAU, self.norm_weight[0])
        y_BTD: Tensor = self.out(y_BTAU.flatten(-2) * F.silu(self.gate(x_BTD)))
        return y_BTD

    def forward(self, x_BTD: Tensor) -> Tensor:
        config, routes = self.config, self._routes(x_BTD, None)
        complete = x_BTD.shape[1] // config.chunk
        if config.penalty and complete:
            share_G = routes.asks[:, :complete].mean((0, 1))
            loss = config.penalty * (share_G - config.kv_share_target).square().sum()
            routes = routes._replace(to_keys=add_loss(routes.to_keys, loss))
        return self._mix(x_BTD, self._project(x_BTD, None), routes, {})[0]

    def _advance(self, x_BTD: Tensor, state: State, in_place: bool) -> tuple[Tensor, State]:
        """Mix a segment; `in_place` writes its only token into the caches of the state."""
        on, routes = self._project(x_BTD, state), self._routes(x_BTD, state)
        T, kept, position = x_BTD.shape[1], state["kept"], state["position"]
        slots, stay = slots_of(T, self.config.chunk, kept, routes.kept, position)
        if in_place:
            write_one(state["key"], on.k_soft, slots)
            write_one(state["value"], on.v_soft, slots)
        y_BTD, written, spared = self._mix(x_BTD, on, routes, state, cached=in_place)
        new_state = {
            "key": state["key"] if in_place else write(state["key"], on.k_soft, slots, stay),
            "value": state["value"] if in_place else write(state["value"], on.v_soft, slots, stay),
            "written": written,
            "spared": spared,
            "score": routes.open_score,
            "kept": kept + routes.kept.sum(1),
            "position": position + T,
        }
        return y_BTD, new_state if on.tail is None else new_state | {"tail": on.tail}

    def mix(self, x_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        return self._advance(x_BTD, state, in_place=False)

    def step(self, x_BD: Tensor, state: State) -> tuple[Tensor, State]:
        y_B1D, new_state = self._advance(x_BD[:, None], state, in_place=True)
        for name, tensor in state.items():
            if new_state[name] is not tensor:
                tensor.copy_(new_state[name])
        return y_B1D.squeeze(1), state

    def observe(self, x_BTD: Tensor) -> dict[str, Tensor]:
        """Return the share of the complete chunks of a batch that each group keeps as keys."""
        complete = x_BTD.shape[1] // self.config.chunk
        kept = self._routes(x_BTD, None).kept[:, :complete].sum((0, 1))
        return {"kv_share": kept / max(1, x_BTD.shape[0] * complete)}

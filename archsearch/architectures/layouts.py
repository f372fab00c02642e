"""How published models lay out their mixers in depth: one function each, sizes as arguments.

A function gives what its model has in common at every size; `published` gives the sizes. Weights of
norms and biases are those of the mixers here, which moves a count by less than a thousandth.
"""

from collections.abc import Collection

from archsearch.arch import ArchSpec, ChannelSpec, LayerSpec
from archsearch.space import Value


def _layer(mixer: str, **fields: Value) -> LayerSpec:
    return LayerSpec(mixer=mixer, fields=fields)


def _gated(inner: int, width: int) -> ChannelSpec:
    return ChannelSpec(kind="swiglu", ratio=inner / width)


def _llama_like(
    width: int, layers: list[LayerSpec], inner: int = 0, tied_head: bool = True
) -> ArchSpec:
    """RMS norm before every mixer, and a gated MLP after it if there is an inner width."""
    return ArchSpec(
        width=width,
        layers=tuple(layers),
        channel_mixer=_gated(inner, width) if inner else ChannelSpec(),
        norm="rmsnorm",
        tied_head=tied_head,
    )


def transformer(width: int, depth: int, heads: int, inner: int, tied_head: bool) -> ArchSpec:
    """Softmax attention with rotary positions, RMS norm and a gated MLP: the modern Transformer."""
    layers = [_layer("attention", heads=heads, rope=True)] * depth
    return _llama_like(width, layers, inner, tied_head)


def windowed_transformer(width: int, depth: int, heads: int, inner: int) -> ArchSpec:
    """The same with a window of 2048 tokens in every layer: Llama-2-SWA of Samba's table 3."""
    return _llama_like(width, [_window(heads)] * depth, inner)


def _window(heads: int, kv_heads: int = 0) -> LayerSpec:
    return _layer("sliding_window", window=2048, heads=heads, kv_heads=kv_heads, rope=True)


def based(
    width: int, depth: int, linear: Collection[int], window: int, global_layer: LayerSpec
) -> ArchSpec:
    """Short convolutions, with a global layer at each of `linear` and a window layer after it."""
    layers = [_layer("base_conv", form="based", kernel=3, expand=2)] * depth
    for index in linear:
        layers[index] = global_layer
        layers[index + 1] = _layer("sliding_window", window=window, heads=16, rope=True)
    return _llama_like(width, layers, inner=2 * width)


def taylor() -> LayerSpec:
    """BASED's global layer: 16 heads of second-order Taylor linear attention."""
    return _layer("linear_attention", feature_map="taylor", feature_dim=16, heads=16)


def taylor_over_prefix() -> LayerSpec:
    """The same that reads the first half of 2048 tokens together: just read twice."""
    return _layer("prefix_linear", feature_dim=16, heads=16, prefix_len=1024)


def _mamba() -> LayerSpec:
    return _layer("mamba", state_dim=16, expand=2, conv=4)


def samba(width: int, depth: int, heads: int, inner: int, kv_heads: int = 0) -> ArchSpec:
    """Mamba and a window by turns, each followed by a gated MLP."""
    pair = [_mamba(), _window(heads, kv_heads)]
    return _llama_like(width, pair * (depth // 2), inner)


def mamba_window_mlp(width: int, repeats: int, heads: int, inner: int) -> ArchSpec:
    """Mamba, a window and one gated MLP, over and over."""
    block = [_mamba(), _window(heads), _layer("swiglu", ratio=inner / width)]
    return _llama_like(width, block * repeats)


def mamba(width: int, depth: int, inner: int = 0) -> ArchSpec:
    """Mamba alone, or each with a gated MLP after it."""
    return _llama_like(width, [_mamba()] * depth, inner)


def mamba2(width: int, depth: int) -> ArchSpec:
    """Mamba-2 alone."""
    layers = [_layer("mamba2", state_dim=128, expand=2, head_dim=64, conv=4)] * depth
    return _llama_like(width, layers, tied_head=False)


def sliding_gla(width: int, depth: int, heads: int, inner: int) -> ArchSpec:
    """Samba with gated linear attention in Mamba's place; heads of 384 values."""
    linear = _layer("gla", heads=width // 384, conv=0)
    return _llama_like(width, [linear, _window(heads)] * (depth // 2), inner)


def sliding_retnet(width: int, depth: int, heads: int, inner: int) -> ArchSpec:
    """Samba with retention in Mamba's place; half the heads, values twice as wide as keys."""
    retention = _layer("retention", heads=heads // 2, expand_v=2)
    return _llama_like(width, [retention, _window(heads)] * (depth // 2), inner)


def _gated_delta(head_dim: int) -> LayerSpec:
    return _layer("gated_delta", heads=6, head_dim=head_dim, expand_v=2, conv=4)


def _softmax(head_dim: int, width: int) -> LayerSpec:
    return _layer("attention", heads=width // head_dim, rope=True)


def gated_delta(width: int, depth: int, head_dim: int, inner: int) -> ArchSpec:
    """Gated DeltaNet in every layer: six heads, values twice as wide as keys."""
    return _llama_like(width, [_gated_delta(head_dim)] * depth, inner, tied_head=False)


def gated_delta_hybrid(
    width: int, depth: int, head_dim: int, attention: Collection[int], inner: int
) -> ArchSpec:
    """Gated DeltaNet with softmax attention in the layers `attention`."""
    layers = [_gated_delta(head_dim)] * depth
    for index in attention:
        layers[index] = _softmax(128, width)
    return _llama_like(width, layers, inner, tied_head=False)


def chunk_routed(
    width: int, depth: int, head_dim: int, heads: int, routed: Collection[int], inner: int
) -> ArchSpec:
    """NAtS-L in the layers `routed` and Gated DeltaNet elsewhere; rotary only if all are routed."""
    layer = _layer(
        "chunk_routed",
        chunk=64,
        groups=6,
        heads=heads,
        head_dim=head_dim * 6 // heads,
        rope=len(routed) == depth,
    )
    layers = [layer if index in routed else _gated_delta(head_dim) for index in range(depth)]
    return _llama_like(width, layers, inner, tied_head=False)


def retnet(width: int, depth: int, heads: int) -> ArchSpec:
    """Retention with values twice as wide as keys, and a plain MLP of twice the width."""
    return ArchSpec(
        width=width,
        layers=(_layer("retention", heads=heads, expand_v=2),) * depth,
        channel_mixer=ChannelSpec(kind="mlp", ratio=2.0),
    )


def gla(width: int, depth: int, inner: int) -> ArchSpec:
    """Gated linear attention with four heads in every layer."""
    return _llama_like(width, [_layer("gla", heads=4, conv=0)] * depth, inner)


def rwkv(width: int, depth: int) -> ArchSpec:
    """RWKV-4: time mixing and channel mixing by turns, both with a token shift."""
    block = (_layer("rwkv4"), _layer("rwkv_channel"))
    return ArchSpec(width=width, layers=block * depth, tied_head=False)

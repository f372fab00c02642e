"""The published architectures: name, source, vocabulary, published size, layout.

A name is a family and a size, such as `samba-421M`; the family alone means its first size. Where a
published count cannot be met, `note` says why.
"""

from collections.abc import Callable
from dataclasses import dataclass

from archsearch.arch import ArchSpec
from archsearch.architectures import layouts
from archsearch.errors import UsageError, nearest

GPT2, LLAMA, PHI2, PHI3, NEOX = 50_257, 32_000, 51_200, 32_064, 50_277
"""Vocabulary sizes in tokens: GPT-2, Llama-2, Phi-2, Phi-3 and GPT-NeoX as RWKV-4 uses it."""

_BASED = "BASED (arXiv:2402.18668)"
_JRT = "Just read twice (arXiv:2407.05483)"
_SAMBA = "Samba (arXiv:2406.07522)"
_NATS_L = "NAtS-L (arXiv:2602.03681)"
_TWO_DIGITS = "Published to two digits."


@dataclass(frozen=True)
class Published:
    """One architecture at one size. `parameters` is the published count, as it was rounded."""

    name: str
    source: str
    vocab_size: int
    parameters: str
    build: Callable[[], ArchSpec]
    note: str = ""

    @property
    def family(self) -> str:
        return self.name.rpartition("-")[0]


PUBLISHED = (
    Published(
        "transformer_pp-778M",
        f"{_NATS_L}, section 5: Transformer, 24 layers",
        LLAMA,
        "778M",
        lambda: layouts.transformer(1536, 24, heads=12, inner=4096, tied_head=False),
        "Heads of 128 are ours; the paper does not give their number.",
    ),
    Published(
        "transformer_pp-438M",
        f"{_SAMBA}, table 3: Llama-2, 12 layers",
        LLAMA,
        "438M",
        lambda: layouts.transformer(1536, 12, heads=12, inner=4096, tied_head=False),
    ),
    Published(
        "llama_swa-1.3B",
        f"{_SAMBA}, table 3: Llama-2-SWA, 20 layers",
        LLAMA,
        "1.3B",
        lambda: layouts.windowed_transformer(2304, 20, heads=18, inner=6144),
        _TWO_DIGITS,
    ),
    Published(
        "based-363M",
        f"{_BASED}, table 7, first column",
        GPT2,
        "363M",
        lambda: layouts.based(1024, 27, (1, 6, 11, 16, 21), 64, layouts.taylor()),
        "The paper's window; the released configuration has window_size 256, which shows 129.",
    ),
    Published(
        "based-1.35B",
        f"{_BASED}, table 7, second column",
        GPT2,
        "1.35B",
        lambda: layouts.based(1792, 36, (1, 6, 11, 16, 21, 27, 33), 16, layouts.taylor()),
        "The paper's window; the released configuration has window_size 256, which shows 129.",
    ),
    Published(
        "jrt_rnn-356M",
        f"{_JRT}, table 15",
        GPT2,
        "356M",
        lambda: layouts.based(1024, 26, (1, 6, 11, 16, 21), 64, layouts.taylor_over_prefix()),
        "Table 15 says 26 layers but lists 5 + 5 + 17 = 27, and a window of 64 where table 16 says "
        "128; 26 layers with 16 convolutions, as released, give the published count.",
    ),
    Published(
        "samba-421M",
        f"{_SAMBA}, table 12",
        LLAMA,
        "421M",
        lambda: layouts.samba(1536, 12, heads=12, inner=4096),
    ),
    Published(
        "samba-1.3B",
        f"{_SAMBA}, table 12",
        LLAMA,
        "1.3B",
        lambda: layouts.samba(2304, 18, heads=18, inner=6144),
        _TWO_DIGITS,
    ),
    Published(
        "samba-1.7B",
        f"{_SAMBA}, table 12",
        PHI2,
        "1.7B",
        lambda: layouts.samba(2048, 24, heads=32, inner=8196, kv_heads=4),
        f"{_TWO_DIGITS} An inner width of 8196 is what the table says.",
    ),
    Published(
        "samba-3.8B",
        f"{_SAMBA}, table 12",
        PHI3,
        "3.8B",
        lambda: layouts.samba(2816, 32, heads=11, inner=9984, kv_heads=1),
        _TWO_DIGITS,
    ),
    Published(
        "mamba_swa_mlp-400M",
        f"{_SAMBA}, table 3: 24 sublayers, as samba-421M has",
        LLAMA,
        "400M",
        lambda: layouts.mamba_window_mlp(1536, 8, heads=12, inner=4096),
    ),
    Published(
        "mamba_mlp-1.9B",
        f"{_SAMBA}, table 2: Mamba-MLP, 48 sublayers",
        PHI2,
        "1.9B",
        lambda: layouts.mamba(2048, 24, inner=8196),
        _TWO_DIGITS,
    ),
    Published(
        "mamba-1.8B",
        f"{_SAMBA}, table 11: Mamba, 64 layers",
        PHI2,
        "1.8B",
        lambda: layouts.mamba(2048, 64),
        f"{_TWO_DIGITS} Section 2.1 says 48 layers, which would be 1.4B.",
    ),
    Published(
        "mamba2-801M",
        f"{_NATS_L}, section 5: Mamba2, 48 layers",
        LLAMA,
        "801M",
        lambda: layouts.mamba2(1536, 48),
    ),
    Published(
        "sliding_gla-1.2B",
        f"{_SAMBA}, table 3: Sliding GLA",
        LLAMA,
        "1.2B",
        lambda: layouts.sliding_gla(2304, 18, heads=18, inner=6144),
        _TWO_DIGITS,
    ),
    Published(
        "sliding_retnet-1.4B",
        f"{_SAMBA}, table 3: Sliding RetNet",
        LLAMA,
        "1.4B",
        lambda: layouts.sliding_retnet(2304, 18, heads=18, inner=6144),
        _TWO_DIGITS,
    ),
    Published(
        "gdn-793M",
        f"{_NATS_L}, section 5: GDN",
        LLAMA,
        "793M",
        lambda: layouts.gated_delta(1536, 21, head_dim=192, inner=4096),
    ),
    Published(
        "gdn_hybrid-802M",
        f"{_NATS_L}, section 5: GDN Hybrid, 17 + 5 layers",
        LLAMA,
        "802M",
        lambda: layouts.gated_delta_hybrid(1536, 22, 192, (3, 7, 11, 15, 19), inner=4096),
        "Every fourth layer is attention; the paper gives the numbers 17 and 5, not the places.",
    ),
    Published(
        "natsl-794M",
        f"{_NATS_L}, section 5: NAtS-L",
        LLAMA,
        "794M",
        lambda: layouts.chunk_routed(1536, 21, 192, heads=18, routed=range(21), inner=4096),
    ),
    Published(
        "natsl_hybrid-793M",
        f"{_NATS_L}, section 5: NAtS-L Hybrid, 15 + 6 layers; its 800M class",
        LLAMA,
        "793M",
        lambda: layouts.chunk_routed(1536, 21, 192, 18, (3, 7, 11, 15, 19, 20), inner=4096),
    ),
    Published(
        "natsl_hybrid-380M",
        f"{_NATS_L}, appendix A.1",
        LLAMA,
        "380M",
        lambda: layouts.chunk_routed(1024, 21, 128, 12, (3, 7, 11, 15, 19, 20), inner=2816),
    ),
    Published(
        "retnet-1.3B",
        "RetNet (arXiv:2307.08621), table 2",
        GPT2,
        "1.3B",
        lambda: layouts.retnet(2048, 24, heads=8),
        _TWO_DIGITS,
    ),
    Published(
        "gla-340M",
        "Gated linear attention (arXiv:2312.06635), section 5",
        LLAMA,
        "340M",
        lambda: layouts.gla(1024, 24, inner=2816),
    ),
    Published(
        "rwkv-169M",
        "RWKV-4 (arXiv:2305.13048), table 2",
        NEOX,
        "169M",
        lambda: layouts.rwkv(768, 12),
    ),
)


def architecture_names() -> tuple[str, ...]:
    """Every name that `published_architecture` accepts: families first."""
    families = dict.fromkeys(one.family for one in PUBLISHED)
    return (*families, *(one.name for one in PUBLISHED))


def published_architecture(name: str) -> Published:
    """Return the architecture of that name, or the first of that family.

    Raises:
        UsageError: there is none; the text lists all.
    """
    for one in PUBLISHED:
        if name in (one.name, one.family):
            return one
    names = architecture_names()
    raise UsageError(
        f"no architecture '{name}'{nearest(name, names)}; there are: "
        + ", ".join(one.name for one in PUBLISHED)
    )

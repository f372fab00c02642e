"""RWKV-4's time mixing as an associative scan: depth log T, work of order T.

Two neighbouring spans of tokens add up to one (`sums.joined`), the older one decayed by as many
tokens as the newer one holds. So the sums after every second token are those of a sequence half as
long, and the others are one token away (Blelloch 1990). The state given is the token before the
first. Which spans meet where depends on their places alone, so that a later token changes no bit of
an earlier output.

Shape suffixes: B batch, T tokens, L spans of equal length, C channels.
"""

import torch
from torch import Tensor

from archsearch_kernels.precision import accumulator
from archsearch_kernels.wkv4.sums import Sums, joined, started


def wkv4(
    k_BTC: Tensor,
    v_BTC: Tensor,
    log_decay_C: Tensor,
    bonus_C: Tensor,
    *,
    state: Sums | None,
    keep_state: bool,
) -> tuple[Tensor, Sums | None]:
    """See `archsearch_kernels.wkv4.wkv4`."""
    compute = accumulator(k_BTC.dtype)
    k, v, log_decay, bonus = (x.to(compute) for x in (k_BTC, v_BTC, log_decay_C, bonus_C))
    T, one = k.shape[1], torch.ones_like(k)
    first, tokens = started(state, k[:, 0], log_decay), Sums(v, one, k)
    written = tokens if keep_state else tokens.each(lambda x: x[:, :-1])
    after = _scan(_side_by_side(first.each(lambda x: x[:, None]), written), log_decay)
    read = joined(after.each(lambda x: x[:, :T]), Sums(v, one, k + bonus), None)
    y_BTC = (read.numerator / read.denominator).to(k_BTC.dtype)
    return y_BTC, after.each(lambda x: x[:, -1].clone()) if keep_state else None


def _scan(spans: Sums, log_decay_C: Tensor) -> Sums:
    """Sums of each (B, L, C) span and all before it; a span's length decays by `log_decay_C`."""
    L = spans.exponent.shape[1]
    if L == 1:
        return spans
    early, late = spans.each(lambda x: x[:, : L - 1 : 2]), spans.each(lambda x: x[:, 1::2])
    odd = _scan(joined(early, late, log_decay_C), 2 * log_decay_C)
    half = (L - 1) // 2  # odd places that have a span after them
    later = joined(odd.each(lambda x: x[:, :half]), spans.each(lambda x: x[:, 2::2]), log_decay_C)
    even = _side_by_side(spans.each(lambda x: x[:, :1]), later)
    return Sums(*(_interleaved(e, o) for e, o in zip(even, odd, strict=True)))


def _side_by_side(one: Sums, other: Sums) -> Sums:
    """Spans of one after the other."""
    return Sums(*(torch.cat(parts, dim=1) for parts in zip(one, other, strict=True)))


def _interleaved(even_BLC: Tensor, odd_BLC: Tensor) -> Tensor:
    """Put spans by turns; of the even ones there may be one more."""
    pairs = odd_BLC.shape[1]
    turns = torch.stack((even_BLC[:, :pairs], odd_BLC), dim=2).flatten(1, 2)
    return torch.cat((turns, even_BLC[:, pairs:]), dim=1)

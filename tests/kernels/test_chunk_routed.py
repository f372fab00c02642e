"""Chunk routing against a textbook loop, its derivatives in the routes, its caps and its cache.

The textbook goes over sequences, heads and tokens one by one and keeps lists; it shares no code
with the kernels.
"""

import itertools
import math

import pytest
import torch
from archsearch_kernels import Sizes, family
from archsearch_kernels.added_loss import add_loss
from archsearch_kernels.chunk_routed import Rules, chunk_routed
from archsearch_kernels.chunk_routed.cache import slots_of, write
from archsearch_kernels.chunk_routed.routing import Past, admit, decide, straight_through
from torch import Tensor
from torch.func import vmap

EXACT = 1e-10
"""fp64 has 16 digits; a hundred terms of size 1 in another order lose two or three."""

ALL_RULES = [
    Rules(chunk, inside, decay, delta)
    for chunk, inside, decay, delta in itertools.product(
        (3, 8), ("both", "softmax", "linear"), (True, False), (True, False)
    )
]
GROUPED = {"heads": 4, "groups": 2, "soft": 8}
"""Two memories and four softmax heads share a route."""


def inputs(
    tokens: int, chunk: int, heads: int = 2, groups: int = 2, soft: int = 2
) -> dict[str, Tensor]:
    """Random inputs from an empty past; routes are hard, of both kinds."""
    generator = torch.Generator().manual_seed(tokens)
    B, K, V, N = 2, 4, 6, -(-tokens // chunk)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    to_keys = (normal(B, N, groups) > 0).double()
    return {
        "q_BTHK": normal(B, tokens, heads, K),
        "k_BTHK": torch.nn.functional.normalize(normal(B, tokens, heads, K), dim=-1),
        "v_BTHV": normal(B, tokens, heads, V),
        "q_BTAI": normal(B, tokens, soft, heads * K // soft),
        "k_BTAI": normal(B, tokens, soft, heads * K // soft),
        "log_decay_BTH": -normal(B, tokens, heads).exp(),
        "beta_BTH": normal(B, tokens, heads).sigmoid(),
        "to_keys_BNG": to_keys,
        "to_memory_BNG": 1 - to_keys,
    }


def textbook_memory(x: dict[str, Tensor], b: int, h: int, rules: Rules) -> tuple[Tensor, ...]:
    """What one head reads, the chunk written and the chunk spared, with matrices written out."""
    q, k, v = (x[name][b, :, h] for name in ("q_BTHK", "k_BTHK", "v_BTHV"))
    alpha, beta = x["log_decay_BTH"][b, :, h].exp(), x["beta_BTH"][b, :, h]
    group = h * x["to_keys_BNG"].shape[2] // x["q_BTHK"].shape[2]
    before = written = spared = q.new_zeros(v.shape[1], k.shape[1])
    rows = []
    for t in range(len(q)):
        erased = alpha[t] * written
        if rules.delta:
            erased = erased @ (torch.eye(len(k[t])).double() - beta[t] * torch.outer(k[t], k[t]))
        written = erased + beta[t] * torch.outer(v[t], k[t])
        first = t - t % rules.chunk
        passed = alpha[first : t + 1].prod() if rules.decay_through else 1.0
        spared = passed * before
        rows.append((spared if rules.inside == "softmax" else written) @ q[t])
        if t % rules.chunk == rules.chunk - 1:
            s = x["to_memory_BNG"][b, t // rules.chunk, group]
            before = written = spared = s * written + (1 - s) * spared
    return torch.stack(rows), written, spared


def textbook_look(x: dict[str, Tensor], b: int, a: int, rules: Rules) -> Tensor:
    """Softmax of one head over lists of keys, each with the weight of its chunk."""
    q, k = x["q_BTAI"][b, :, a], x["k_BTAI"][b, :, a]
    heads = x["q_BTAI"].shape[2]
    size = x["v_BTHV"][0, 0].numel() // heads
    v = x["v_BTHV"][b].flatten(1)[:, a * size : (a + 1) * size]
    group = a * x["to_keys_BNG"].shape[2] // heads
    rows = []
    for t in range(len(q)):
        above, below = torch.zeros(size, dtype=q.dtype), torch.zeros((), dtype=q.dtype)
        for j in range(t + 1):
            own = j // rules.chunk == t // rules.chunk
            if own and rules.inside == "linear":
                continue
            weight = torch.exp(q[t] @ k[j] / math.sqrt(len(q[t])))
            if not own:
                weight = weight * x["to_keys_BNG"][b, j // rules.chunk, group]
            above, below = above + weight * v[j], below + weight
        rows.append(above / below if below > 0 else above)
    return torch.stack(rows)


def textbook(x: dict[str, Tensor], rules: Rules) -> tuple[Tensor, Tensor, Tensor]:
    B, _, H, _ = x["q_BTHK"].shape
    A = x["q_BTAI"].shape[2]
    read = [[textbook_memory(x, b, h, rules) for h in range(H)] for b in range(B)]
    y = torch.stack([torch.cat([r[0] for r in row], 1) for row in read])
    looked = [torch.cat([textbook_look(x, b, a, rules) for a in range(A)], 1) for b in range(B)]
    written, spared = (
        torch.stack([torch.stack([r[i] for r in row]) for row in read]) for i in (1, 2)
    )
    return torch.stack((torch.stack(looked), y), 2), written, spared


def with_gradients(op: object, x: dict[str, Tensor], *arguments: object) -> list[Tensor]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
    outputs = op(leaves, *arguments)  # type: ignore[operator]
    moving = [y for y in outputs if y.requires_grad]  # a lone token spared without decay: zeros
    weights = [torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape) for y in moving]
    gradients = torch.autograd.grad(
        moving, list(leaves.values()), weights, allow_unused=True, materialize_grads=True
    )
    return [*outputs, *gradients]


def run(x: dict[str, Tensor], rules: Rules, backend: str) -> tuple[Tensor, ...]:
    return chunk_routed(**x, rules=rules, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", ALL_RULES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_backends_are_the_textbook_loop(backend: str, rules: Rules) -> None:
    for tokens in (1, rules.chunk, 2 * rules.chunk + 1):
        x = inputs(tokens, rules.chunk)
        expected = with_gradients(textbook, x, rules)
        for mine, theirs in zip(with_gradients(run, x, rules, backend), expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_routes_are_shared_by_the_heads_of_a_group(backend: str) -> None:
    x, rules = inputs(13, 4, **GROUPED), Rules(4)
    expected = with_gradients(textbook, x, rules)
    for mine, theirs in zip(with_gradients(run, x, rules, backend), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("inside", ["both", "softmax", "linear"])
@pytest.mark.parametrize("cut", [1, 4, 6, 11])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_cache_of_kept_chunks_stands_for_the_past(backend: str, cut: int, inside: str) -> None:
    """The textbook sees everything; the op sees what a decoder has kept after `cut` tokens."""
    rules = Rules(4, inside)
    x = inputs(13, 4, **GROUPED)
    whole, *memories = textbook(x, rules)
    _, written, spared = textbook(before(x, cut), rules)
    done = cut // 4
    kept_BG = x["to_keys_BNG"][:, :done].sum(1).long()
    B, G = kept_BG.shape
    A, heads = x["q_BTAI"].shape[2], x["q_BTAI"].shape[2] // G
    values = x["v_BTHV"].flatten(2).unflatten(2, (A, -1))
    cache = {}
    for name, source in (("key_BSAI", x["k_BTAI"]), ("value_BSAU", values)):
        cache[name] = torch.full((B, 16, *source.shape[2:]), 7.0, dtype=source.dtype)  # litter
        for b, a in itertools.product(range(B), range(A)):
            chosen = x["to_keys_BNG"][b, :done, a // heads] > 0
            rows = [source[b, 4 * n : 4 * n + 4, a] for n in range(done) if chosen[n]]
            filled = torch.cat([*rows, source[b, 4 * done : cut, a]])
            cache[name][b, : len(filled), a] = filled
    rest = {name: tensor[:, cut:] for name, tensor in x.items()}
    touched = (13 - cut + 2) // 4 + 1
    for name in ("to_keys_BNG", "to_memory_BNG"):
        rest[name] = torch.nn.functional.pad(x[name][:, done:], (0, 0, 0, 4))[:, :touched]
    y, *after = chunk_routed(
        **rest,  # type: ignore[arg-type]
        **cache,
        rules=rules,
        written_BHVK=written,
        spared_BHVK=spared,
        kept_BG=kept_BG,
        offset_B=torch.full((B,), cut % 4),
        backend=backend,
    )
    for mine, theirs in zip((y, *after), (whole[:, cut:], *memories), strict=True):
        torch.testing.assert_close(mine, theirs, atol=EXACT, rtol=EXACT)


def before(x: dict[str, Tensor], cut: int) -> dict[str, Tensor]:
    per_chunk = ("to_keys_BNG", "to_memory_BNG")
    return {name: tensor if name in per_chunk else tensor[:, :cut] for name, tensor in x.items()}


@pytest.mark.parametrize("name", ["to_keys_BNG", "to_memory_BNG"])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_derivatives_in_hard_routes_are_those_of_differences(backend: str, name: str) -> None:
    x, rules, step = inputs(14, 4), Rules(4), 1e-6
    weight = torch.sin(torch.arange(2 * 14 * 2 * 12).double()).view(2, 14, 2, 12)
    x[name].requires_grad_()
    (gradient,) = torch.autograd.grad((run(x, rules, backend)[0] * weight).sum(), x[name])
    for b, n, g in itertools.product(range(2), range(3), range(2)):
        values = []
        for sign in (1, -1):
            moved = x[name].detach().clone()
            moved[b, n, g] += sign * step
            values.append((run({**x, name: moved}, rules, backend)[0] * weight).sum().item())
        difference = (values[0] - values[1]) / (2 * step)
        # Second differences of size 1 give step^2; rounding of sums of 600 numbers, 1e-13 / step.
        assert abs(gradient[b, n, g].item() - difference) < 1e-6
    assert gradient[:, 3].abs().max() == 0  # not complete: its route is not felt


def test_derivatives_in_routes_are_those_of_the_paper() -> None:
    """Keys: sum of P_ij (g_i . (v_j - z_i)); memory: the state's gradient times the difference."""
    x, rules = inputs(8, 4, heads=1, groups=1, soft=1), Rules(4)
    g = torch.cos(torch.arange(2 * 8 * 6).double()).view(2, 8, 6)
    for name in ("to_keys_BNG", "to_memory_BNG"):
        x[name].requires_grad_()
    y, *_ = run(x, rules, "chunked")
    keys, memory = torch.autograd.grad(
        (y * g[:, :, None]).sum(), [x["to_keys_BNG"], x["to_memory_BNG"]]
    )
    for b in range(2):
        r, z = x["to_keys_BNG"][b, 0, 0], y[b, :, 0]
        score = (x["q_BTAI"][b, :, 0] @ x["k_BTAI"][b, :, 0].T / 2).exp().tril()
        total = torch.cat((score[:4].sum(1), score[4:, 4:].sum(1) + r * score[4:, :4].sum(1)))
        v = x["v_BTHV"][b, :, 0]
        expected = sum(
            score[i, j] / total[i] * (g[b, i] @ (v[j] - z[i]))
            for i in range(4, 8)
            for j in range(4)
        )
        torch.testing.assert_close(keys[b, 0, 0], expected.detach(), atol=EXACT, rtol=EXACT)
    halves = [{**x, "to_memory_BNG": torch.full((2, 2, 1), s).double()} for s in (0.0, 1.0)]
    spared, written = (
        (run(half, rules, "reference")[0][:, :, 1] * g).sum((1, 2)) for half in halves
    )
    # What is read is linear in the state before it, so the difference is the derivative.
    torch.testing.assert_close(memory[:, 0, 0], (written - spared).detach(), atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_no_score_of_a_dropped_key_can_overflow(backend: str) -> None:
    x = {name: tensor.float() for name, tensor in inputs(8, 4).items()}
    x["k_BTAI"][:, :4] = 1000 * x["q_BTAI"][:, 4:]
    x["to_keys_BNG"][:] = 0
    outputs = with_gradients(run, x, Rules(4), backend)
    assert all(tensor.isfinite().all() for tensor in outputs)
    moved = {**x, "v_BTHV": x["v_BTHV"].clone()}
    moved["v_BTHV"][:, :4] += 1
    assert torch.equal(
        run(x, Rules(4), backend)[0][:, 4:, 0], run(moved, Rules(4), backend)[0][:, 4:, 0]
    )


def first_come(wants: list[bool], share: float, most: int) -> list[bool]:
    kept: list[bool] = []
    for n, want in enumerate(wants, start=1):
        limit = math.floor(share * n + 1e-9)
        limit = min(limit, most) if most else limit
        kept.append(want and sum(kept) + 1 <= limit)
    return kept


@pytest.mark.parametrize(("share", "most"), [(0.0, 0), (0.3, 0), (0.5, 2), (1.0, 3), (1.0, 0)])
@pytest.mark.parametrize("cut", [0, 1, 7])
def test_caps_admit_first_come_first_served(share: float, most: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.rand(3, 12, 2, generator=generator) < 0.7
    head = admit(wanted[:, :cut], None, None, share, most)
    rest = admit(wanted[:, cut:], head.sum(1), torch.full((3,), cut), share, most)
    found = torch.cat((head, rest), 1)
    for b, g in itertools.product(range(3), range(2)):
        assert found[b, :, g].tolist() == first_come(wanted[b, :, g].tolist(), share, most)


def test_scores_of_segments_are_those_of_the_sequence() -> None:
    score = torch.randn(2, 23, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = decide(score, None, None, chunk=4, share=0.5)
    expected = (score[:, :20].unflatten(1, (5, 4)).mean(2) >= 0)[:, :5]
    asked = whole.asks[:, :5].bool()
    assert torch.equal(asked, expected) and not whole.asks[:, 5].any()
    zero = torch.zeros(2, dtype=torch.int64)
    past = Past(score.new_zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), zero)
    kept = []
    for part in score.split([3, 1, 6, 13], 1):
        routes = decide(part, None, past, chunk=4, share=0.5)
        length = part.shape[1]
        complete = (past.position + length) // 4 - past.position // 4
        kept.append(routes.kept[:, : int(complete[0])])
        past = Past(routes.open_score, past.kept + routes.kept.sum(1), past.position + length)
    assert torch.equal(torch.cat(kept, 1), whole.kept[:, :5])
    torch.testing.assert_close(past.score, score[:, 20:].sum(1), atol=EXACT, rtol=EXACT)


def test_a_segment_leaves_nothing_of_dropped_chunks_in_the_cache() -> None:
    """Two of a chunk's four tokens were there; of chunks 0 to 2, one is kept, and 3 is open."""
    kept = torch.tensor([[[False], [True], [False], [False]]])
    position, tokens = torch.tensor([6]), 12
    slot, stays = slots_of(tokens, 4, torch.tensor([[1]]), kept, position)
    assert slot[0, :, 0].tolist() == [6, 7, 4, 5, 6, 7, 8, 9, 10, 11, 8, 9]
    assert stays[0, :, 0].tolist() == [False] * 2 + [True] * 4 + [False] * 4 + [True] * 2
    cache, x = (
        torch.zeros(1, 12, 2, 1),
        torch.arange(1.0, 13.0).view(1, 12, 1, 1).expand(1, 12, 2, 1),
    )
    after = write(cache, x, slot, stays)
    assert after[0, :, 1, 0].tolist() == [0, 0, 0, 0, 3, 4, 5, 6, 11, 12, 0, 0]
    assert not cache.any()


def test_straight_through_is_hard_and_has_the_gradient_of_the_chance() -> None:
    chance = torch.rand(4, 5, 1, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hard = torch.arange(20).view(4, 5, 1) % 3 == 0
    for gradient in ("selected", "both"):
        routes = straight_through(hard, chance, gradient)
        assert torch.equal(routes[0].bool(), hard) and torch.equal(
            routes[0] + routes[1], torch.ones(4, 5, 1)
        )
        found = [torch.autograd.grad(route.sum(), chance)[0] for route in routes]
        taken = [hard.float(), -(~hard).float()] if gradient == "selected" else [1.0, -1.0]
        for mine, expected in zip(found, taken, strict=True):
            assert torch.equal(mine, torch.ones(4, 5, 1) * expected)


def test_an_added_loss_counts_once_in_each_member() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).requires_grad_()

    def member(w: Tensor) -> Tensor:
        return add_loss(5 * w, w.square().sum()).sum()

    for scale in (1.0, 0.0):
        (gradient,) = torch.autograd.grad(scale * vmap(member)(weight).sum(), weight)
        assert torch.equal(gradient, scale * 5 + 2 * weight.detach())
    assert torch.equal(vmap(member)(weight), 5 * weight.sum(1))


def test_the_check_of_kernels_has_chunks_of_both_kinds() -> None:
    sizes = Sizes(batch=2, tokens=65, heads=2, head_size=16, state=True)
    call = family("chunk_routed").make_inputs(sizes)
    assert set(call.tensors["to_keys_BNG"].flatten().tolist()) == {0.0, 1.0}

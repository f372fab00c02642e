"""What the built-in mixers promise beyond the contract: clear refusals, in-place steps, memory."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from archsearch.errors import InfeasibleError
from archsearch.mixer import Mixer, State
from archsearch.registry import load_mixer, make_config, mixer_fields, mixer_names
from archsearch.space import Value

REFUSED: list[tuple[str, int, dict[str, Value], str]] = [
    ("attention", 32, {"heads": 3}, "heads is 3; it must divide the width 32"),
    ("attention", 32, {"heads": 0}, "heads is 0; it must divide the width 32"),
    ("attention", 32, {"heads": 4, "kv_heads": 3}, "kv_heads is 3; it must divide heads,"),
    ("attention", 32, {"heads": 4, "kv_heads": -2}, "kv_heads is -2; it must divide heads,"),
    ("attention", 32, {"heads": 2, "kv_heads": 4}, "kv_heads is 4; it must divide heads,"),
    ("attention", 12, {"heads": 4, "rope": True}, "width 12 / 4 heads gives 3"),
    ("sliding_window", 32, {"window": 0}, "window is 0; it must be at least 1"),
    ("sliding_window", 32, {"heads": 5}, "heads is 5; it must divide the width 32"),
    ("sliding_window", 6, {"heads": 2, "rope": True}, "rope needs an even head size"),
    ("linear_attention", 32, {"heads": 6}, "heads is 6; it must divide the width 32"),
    ("linear_attention", 32, {"feature_dim": 0}, "feature_dim is 0; it must be at least 1"),
    ("linear_attention", 32, {"feature_map": "gelu"}, "no feature map 'gelu'; there are: taylor,"),
    ("base_conv", 32, {"kernel": 1}, "kernel is 1; it must be at least 2"),
    ("gated_delta", 32, {"heads": 0}, "heads is 0; it must be at least 1"),
    ("gated_delta", 32, {"head_dim": -8}, "head_dim is -8; it must be at least 1"),
    ("gated_delta", 32, {"expand_v": 0}, "expand_v is 0; it must be at least 1"),
    ("gated_delta", 32, {"conv": 1}, "conv is 1; it must be 0 or at least 2"),
]


@pytest.mark.parametrize(("mixer", "width", "fields", "sentence"), REFUSED)
def test_values_that_do_not_fit_are_refused_in_a_sentence(
    mixer: str, width: int, fields: Mapping[str, Value], sentence: str
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        make_config(mixer, width, fields)
    assert str(caught.value).startswith(f"mixer '{mixer}': ")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("mixer", mixer_names())
def test_costs_of_a_context_without_end_are_known_at_once(mixer: str) -> None:
    config = make_config(mixer, 32, {})
    assert config.flops(10**9) > 0
    assert config.state_range(10**9, torch.float32).maximum >= 0


def test_an_architecture_too_large_to_build_is_counted_at_once() -> None:
    fields: dict[str, Value] = {"feature_map": "performer", "random_features": 2**31}
    with torch.device("meta"):
        module = load_mixer("linear_attention")(make_config("linear_attention", 32, fields))
    assert module.get_buffer("projection").shape == (2**31, 16)


@pytest.mark.parametrize("mixer", mixer_names())
def test_every_field_says_what_it_is(mixer: str) -> None:
    assert all(field.doc for field in mixer_fields(mixer).values())


@pytest.mark.parametrize("width", [32, 128])
@pytest.mark.parametrize("mixer", mixer_names())
def test_defaults_fit_small_and_real_models(mixer: str, width: int) -> None:
    make_config(mixer, width, {})


def build(mixer: str, width: int, **fields: Value) -> Mixer:
    torch.manual_seed(0)
    return load_mixer(mixer)(make_config(mixer, width, fields))


def places(state: State) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in state.items()}


@pytest.mark.parametrize("mixer", mixer_names())
@torch.no_grad()
def test_step_writes_into_the_state_it_is_given(mixer: str) -> None:
    """A captured decode loop replays on the same memory."""
    module = build(mixer, 16)
    state = module.init_state(2, 9, torch.float32, "cpu")
    before = places(state)
    for x_BD in torch.randn(9, 2, 16):
        _, state = module.step(x_BD, state)
    assert places(state) == before


@pytest.mark.parametrize("mixer", mixer_names())
@torch.no_grad()
def test_sequences_of_a_batch_may_be_at_different_positions(mixer: str) -> None:
    """Rows that were read apart, and are joined afterwards, go on as they would have alone."""
    module = build(mixer, 16)
    x_BTD = torch.randn(2, 12, 16)
    apart: list[Tensor] = []
    states: list[State] = []
    for row, length in enumerate((3, 7)):
        x = x_BTD[row : row + 1]
        _, state = module.mix(x[:, :length], module.init_state(1, 12, torch.float32, "cpu"))
        states.append(state)
        apart.append(module.mix(x[:, length : length + 5], state)[0])
    joined = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    segment = torch.stack((x_BTD[0, 3:8], x_BTD[1, 7:12]))
    y_BTD, _ = module.mix(segment, joined)
    torch.testing.assert_close(y_BTD, torch.cat(apart))
    steps = []
    for x_BD in segment.unbind(1):
        y_BD, joined = module.step(x_BD, joined)
        steps.append(y_BD)
    torch.testing.assert_close(torch.stack(steps, 1), torch.cat(apart))


@torch.no_grad()
def test_attention_refuses_more_tokens_than_its_cache_holds() -> None:
    module = build("attention", 16)
    state = module.init_state(1, 4, torch.float32, "cpu")
    _, state = module.mix(torch.randn(1, 4, 16), state)
    with pytest.raises(RuntimeError, match="out of bounds"):
        module.step(torch.randn(1, 16), state)


@pytest.mark.parametrize("mixer", ["linear_attention", "gated_delta"])
@torch.no_grad()
def test_long_decode_stays_close_to_one_pass_in_bf16(mixer: str) -> None:
    """The memory is fp32, so that 500 small updates are not lost to rounding.

    Tolerance: bf16 outputs carry 8 bits, half a percent; four of these for the roundings on the
    way.
    """
    module = build(mixer, 16).bfloat16()
    x_BTD = torch.randn(1, 500, 16).bfloat16()
    expected = module(x_BTD).float()
    state = module.init_state(1, 500, torch.bfloat16, "cpu")
    for t in range(500):
        y_BD, state = module.step(x_BTD[:, t], state)
    last = expected[:, -1]
    assert (y_BD.float() - last).square().mean().sqrt() < 0.02 * last.square().mean().sqrt()


@torch.no_grad()
def test_rotary_positions_are_relative() -> None:
    """The same window of tokens, later in a sequence, gives the same output."""
    module = build("sliding_window", 16, window=4, rope=True)
    x_BTD = 10 * torch.randn(1, 9, 16)  # large, so that scores and their rotation matter
    early = module(x_BTD)
    late = module(torch.cat((torch.randn(1, 21, 16), x_BTD), dim=1))
    torch.testing.assert_close(late[:, -6:], early[:, -6:])
    assert not torch.allclose(late[:, -9:], early)  # these see other tokens


@torch.no_grad()
def test_a_window_over_everything_is_attention() -> None:
    fields: dict[str, Value] = {"heads": 2, "rope": True}
    window = build("sliding_window", 16, window=12, **fields)
    attention = build("attention", 16, **fields)
    attention.load_state_dict(window.state_dict())
    x_BTD = 10 * torch.randn(2, 12, 16)
    torch.testing.assert_close(window(x_BTD), attention(x_BTD))

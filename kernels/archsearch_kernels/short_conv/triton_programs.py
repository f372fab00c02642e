# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code=assignment
# ruff: noqa: RUF005 - what compiles these programs knows no other way to make a tuple longer
"""Triton programs of the short convolution: one pass forward, one recomputing pass backward.

A program walks along one part of a sequence, U tokens at a time: their rows are loaded at once, and
the last P inputs stay in registers, so that each number is read once. What a part sees of the one
before, and what its gradient sees of the one after, is read again: P tokens.

`rows` is the rows of one member, which share its taps; rows of members follow each other.

Shape suffixes: M members, B rows, T tokens, C channels (of a block inside programs), J taps,
P = J - 1, S partial sums.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def _taps(weight, bias, m, channel_C, inside_C, C: tl.constexpr, J: tl.constexpr,
          HAS_BIAS: tl.constexpr):  # fmt: skip
    """The J taps of a block of channels, and their bias."""
    at_C = m * C + channel_C
    taps = ()
    for j in tl.static_range(J):
        taps = taps + (tl.load(weight + at_C * J + j, mask=inside_C, other=0.0).to(tl.float32),)
    bias_C = tl.zeros(channel_C.shape, tl.float32)
    if HAS_BIAS:
        bias_C = tl.load(bias + at_C, mask=inside_C, other=0.0).to(tl.float32)
    return taps, bias_C


@triton.jit
def _past(x, tail, begin, x_t, tail_t, inside_C, P: tl.constexpr, HAS_TAIL: tl.constexpr):
    """The P inputs before token `begin`: of the sequence, or of the tail."""
    past = ()
    for p in tl.static_range(P):
        t = begin - P + p
        x_C = tl.load(x + tl.cast(t, tl.int64) * x_t, mask=inside_C & (t >= 0), other=0.0)
        x_C = x_C.to(tl.float32)
        if HAS_TAIL:
            before_C = tl.load(tail + (t + P) * tail_t, mask=inside_C & (t < 0), other=0.0)
            x_C += before_C.to(tl.float32)
        past = past + (x_C,)
    return past


@triton.jit
def _rows(x, t0, stride, limit, inside_C, U: tl.constexpr):
    """U rows from token `t0` on; those from `limit` on are zeros."""
    rows = ()
    for u in tl.static_range(U):
        at_C = x + tl.cast(t0 + u, tl.int64) * stride
        x_C = tl.load(at_C, mask=inside_C & (t0 + u < limit), other=0.0)
        rows = rows + (x_C.to(tl.float32),)
    return rows


@triton.jit
def _convolved(seen, taps, bias_C, u: tl.constexpr, J: tl.constexpr):
    """The sum over taps at token u of those that `seen` has after the first J - 1."""
    sum_C = bias_C
    for j in tl.static_range(J):
        sum_C += taps[j] * seen[u + j]
    return sum_C


@triton.jit
def _last(seen, first: tl.constexpr, count: tl.constexpr):
    """`count` of some rows, from row `first` on."""
    rows = ()
    for i in tl.static_range(count):
        rows = rows + (seen[first + i],)
    return rows


@triton.jit(do_not_specialize=["T", "each", "parts", "rows"])
def forward(
    x, weight, bias, gate, tail, y, T, each, parts, rows, x_b, x_t, gate_b, gate_t, tail_b, tail_t,
    C: tl.constexpr, J: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_TAIL: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Outputs of one part of one row, one block of channels."""
    blocks: tl.constexpr = (C + BC - 1) // BC
    P: tl.constexpr = J - 1
    pid = tl.program_id(0)
    channel_C = pid % blocks * BC + tl.arange(0, BC)
    inside_C = channel_C < C
    part, b = pid // blocks % parts, tl.cast(pid // blocks // parts, tl.int64)
    taps, bias_C = _taps(weight, bias, b // rows, channel_C, inside_C, C, J, HAS_BIAS)
    x += b * x_b + channel_C
    gate += b * gate_b + channel_C
    y += b * T * C + channel_C
    begin = part * each
    past = _past(x, tail + b * tail_b + channel_C, begin, x_t, tail_t, inside_C, P, HAS_TAIL)
    end = tl.minimum(begin + each, T)
    for t0 in range(begin, end, U):
        seen = past + _rows(x, t0, x_t, end, inside_C, U)
        gates = _rows(gate, t0, gate_t, end, inside_C, U if HAS_GATE else 0)
        for u in tl.static_range(U):
            y_C = _convolved(seen, taps, bias_C, u, J)
            if SILU:
                y_C = y_C * tl.sigmoid(y_C)
            if HAS_GATE:
                y_C = y_C * gates[u]
            if RESIDUAL:
                y_C += seen[u + P]
            at_C = y + tl.cast(t0 + u, tl.int64) * C
            tl.store(at_C, y_C.to(y.dtype.element_ty), mask=inside_C & (t0 + u < end))
        past = _last(seen, U, P)


@triton.jit(do_not_specialize=["T", "each", "parts", "rows", "group"])
def backward(
    x, weight, bias, gate, tail, dy, dx, d_gate, d_tail, sums, T, each, parts, rows, group, x_b,
    x_t, gate_b, gate_t, tail_b, tail_t, dy_b, dy_t, C: tl.constexpr, J: tl.constexpr,
    BC: tl.constexpr, U: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_TAIL: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """All gradients of one part of `group` rows of one member, one block of channels.

    Those of its taps and bias are stored as one partial sum, sums_MSJC with the bias last.
    """
    blocks: tl.constexpr = (C + BC - 1) // BC
    P: tl.constexpr = J - 1
    groups = (rows + group - 1) // group
    pid = tl.program_id(0)
    channel_C = pid % blocks * BC + tl.arange(0, BC)
    inside_C = channel_C < C
    part = pid // blocks % parts
    m, first = pid // blocks // parts // groups, pid // blocks // parts % groups * group
    taps, bias_C = _taps(
        weight, bias, tl.cast(m, tl.int64), channel_C, inside_C, C, J, HAS_BIAS
    )  # fmt: skip
    total = ()
    for _ in tl.static_range(J + 1):
        total = total + (tl.zeros([BC], tl.float32),)
    for row in range(first, tl.minimum(first + group, rows)):
        b = tl.cast(m, tl.int64) * rows + row
        at_row = b * T * C + channel_C
        total = _gradients(
            x + b * x_b + channel_C, gate + b * gate_b + channel_C, tail + b * tail_b + channel_C,
            dy + b * dy_b + channel_C, dx + at_row, d_gate + at_row, d_tail + b * P * C + channel_C,
            total, taps, bias_C, inside_C, T, part * each, tl.minimum(part * each + each, T), x_t,
            gate_t, tail_t, dy_t, C, J, U, HAS_GATE, HAS_TAIL, SILU, RESIDUAL,
        )  # fmt: skip
    at_C = sums + tl.cast(pid // blocks, tl.int64) * (J + 1) * C + channel_C
    for j in tl.static_range(J + 1):
        tl.store(at_C + j * C, total[j], mask=inside_C)


@triton.jit
def _gradients(
    x, gate, tail, dy, dx, d_gate, d_tail, total, taps, bias_C, inside_C, T, begin, end, x_t,
    gate_t, tail_t, dy_t, C: tl.constexpr, J: tl.constexpr, U: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_TAIL: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Gradients of tokens `begin` to `end` of one row, whose part of the sums is added to `total`.

    The gradient dc_t of the convolution's output reaches the inputs of t and the P tokens before:
    dx_{t-P} is known at token t, and the walk ends P tokens after the part.
    """
    P: tl.constexpr = J - 1
    past = _past(x, tail, begin, x_t, tail_t, inside_C, P, HAS_TAIL)
    dc_past = ()
    for _ in tl.static_range(P):
        dc_past = dc_past + (tl.zeros(bias_C.shape, tl.float32),)
    for t0 in range(begin, end + P, U):
        seen = past + _rows(x, t0, x_t, T, inside_C, U)
        gates = _rows(gate, t0, gate_t, T, inside_C, U if HAS_GATE else 0)
        given = _rows(dy, t0, dy_t, T, inside_C, U)
        dc = dc_past
        for u in tl.static_range(U):
            t = t0 + u
            dc_C = given[u]
            if HAS_GATE or SILU:
                dc_C, d_gate_C = _through_output(
                    _convolved(seen, taps, bias_C, u, J), dc_C, gates[u] if HAS_GATE else dc_C,
                    HAS_GATE, SILU,
                )  # fmt: skip
                if HAS_GATE:
                    at_C = d_gate + tl.cast(t, tl.int64) * C
                    tl.store(at_C, d_gate_C.to(dx.dtype.element_ty), mask=inside_C & (t < end))
            dc = dc + (dc_C,)
            dx_C = tl.zeros(bias_C.shape, tl.float32)
            for j in tl.static_range(J):
                dx_C += taps[j] * dc[u + P - j]
            if RESIDUAL:
                at_C = dy + tl.cast(t - P, tl.int64) * dy_t
                is_mine = (t - P >= begin) & (t - P < end)
                dx_C += tl.load(at_C, mask=inside_C & is_mine, other=0.0).to(tl.float32)
            _store_input(dx, d_tail, dx_C, t, begin, end, inside_C, C, P, HAS_TAIL)
            total = _added(total, seen, tl.where(t < end, dc_C, 0.0), u, J)
        past = _last(seen, U, P)
        dc_past = _last(dc, U, P)
    return total


@triton.jit
def _through_output(c_C, dy_C, gate_C, HAS_GATE: tl.constexpr, SILU: tl.constexpr):
    """Gradients of the convolution's output and of the gate."""
    if SILU:
        sigmoid_C = tl.sigmoid(c_C)
        active_C = c_C * sigmoid_C
        slope_C = sigmoid_C + active_C * (1.0 - sigmoid_C)
        d_gate_C = dy_C * active_C
        dc_C = dy_C * slope_C
    else:
        d_gate_C = dy_C * c_C
        dc_C = dy_C
    if HAS_GATE:
        dc_C = dc_C * gate_C
    return dc_C, d_gate_C


@triton.jit
def _store_input(dx, d_tail, dx_C, t, begin, end, inside_C, C: tl.constexpr, P: tl.constexpr,
                 HAS_TAIL: tl.constexpr):  # fmt: skip
    """Store the gradient of the input P tokens before t, one of the tail if that is before 0."""
    to = t - P
    rounded_C = dx_C.to(dx.dtype.element_ty)
    is_mine = (to >= begin) & (to < end)
    tl.store(dx + tl.cast(to, tl.int64) * C, rounded_C, mask=inside_C & is_mine)
    if HAS_TAIL:
        tl.store(d_tail + t * C, rounded_C, mask=inside_C & (to < 0))


@triton.jit
def _added(total, seen, dc_C, u: tl.constexpr, J: tl.constexpr):
    """The sums of gradients of taps and bias with one more token."""
    new = ()
    for j in tl.static_range(J):
        new = new + (total[j] + dc_C * seen[u + j],)
    return new + (total[J] + dc_C,)

"""Compares kernel backends with their reference on a device, before anything trusts them there.

The forward pass and every gradient are compared. The truth is the reference in fp64 on the very
same (rounded) inputs. A backend passes if, tensor by tensor, its error is at most twice the error
the reference makes in the same dtype, plus a rounding band. Errors are root mean squares relative
to the truth. Knows nothing of studies, models or mixers.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import archsearch_kernels
import torch
from archsearch_kernels import REFERENCE, Call, Family, Sizes, families, family
from torch import Tensor

from archsearch.errors import KernelRefusedError

TOKENS = (1, 33, 65)
"""One token, and one more than 32 and 64, so that a backend's last block is not full."""

HEAD_SIZES = (16, 20)
"""One power of two, and one that is none."""

ONE_ROUNDING = 0.3
"""Root mean square of a rounding, in units of the dtype's epsilon: 1 / sqrt(12)."""

FACTORS = math.sqrt(2)
"""Roundings more that a backend may make which multiplies in half precision: one of each of two
factors, and errors add as their squares."""

REORDERED = 4.0
"""Epsilons of fp32, for each 16 of head size, that sums in another order may differ by. The longest
sums run over about head_size^2 / 2 features, and errors of n terms add as sqrt(n). The reference's
own error can be zero by chance, as it is with one token."""

SMALLEST_SCALE = 1.0
"""Errors are relative, but to no less than this, the size of the inputs: a gradient that cancels
(that of a lone token's query is zero) has no digits to compare."""


@dataclass(frozen=True)
class KernelVerdict:
    """How one backend compares with its reference on one device in one dtype.

    `forward_error` and `gradient_error` are the largest relative errors found. `worst` names the
    tensor that came closest to its tolerance or passed it, and `tolerance` is that tensor's.
    """

    family: str
    backend: str
    device: str
    dtype: str
    ok: bool
    forward_error: float
    gradient_error: float
    tolerance: float
    worst: str


@dataclass(frozen=True)
class _Finding:
    """The comparison of one tensor."""

    name: str
    is_gradient: bool
    error: float
    tolerance: float

    @property
    def ratio(self) -> float:
        return self.error / self.tolerance


def check_kernels(
    device: torch.device | str,
    head_sizes: Iterable[int] = HEAD_SIZES,
    dtypes: Iterable[torch.dtype] = (torch.float32,),
) -> list[KernelVerdict]:
    """Compare every backend that runs on the device with its reference, in each dtype."""
    sizes, wanted = tuple(head_sizes), tuple(dtypes)
    return [
        check(one, backend, device, sizes, dtype)
        for one in families()
        for backend in one.backends_on(torch.device(device).type)
        if backend != REFERENCE
        for dtype in wanted
    ]


def require(
    name: str,
    backend: str,
    device: torch.device | str,
    head_sizes: Iterable[int] = HEAD_SIZES,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Check one backend once in a process; the reference needs no check.

    Raises:
        KernelRefusedError: there is no such family or backend, or its numbers differ.
    """
    verdict = find_verdict(name, backend, device, head_sizes, dtype)
    if verdict is not None and not verdict.ok:
        raise KernelRefusedError(
            f"kernel '{name}', backend '{backend}' differs from its reference on {verdict.device} "
            f"in {verdict.dtype}: relative error {verdict.forward_error:.3g} forward, "
            f"{verdict.gradient_error:.3g} in gradients; {verdict.tolerance:.3g} is allowed for "
            f"{verdict.worst}. Choose another backend: {', '.join(family(name).backends)}"
        )


def find_verdict(
    name: str,
    backend: str,
    device: torch.device | str,
    head_sizes: Iterable[int],
    dtype: torch.dtype,
) -> KernelVerdict | None:
    """Check one backend once in a process; None for the reference.

    Raises:
        KernelRefusedError: there is no such family or backend.
    """
    try:
        return _verdict(name, backend, str(device), tuple(head_sizes), dtype)
    except LookupError as error:
        raise KernelRefusedError(str(error)) from error


def check_key(
    name: str, backend: str, device_model: str, head_sizes: Iterable[int], dtype: torch.dtype
) -> str:
    """Hash of all that a verdict depends on: with the same key it need not be sought again."""
    shapes = f"head sizes {tuple(head_sizes)}, tokens {TOKENS}"
    parts = (name, backend, device_model, shapes, str(dtype), *library_versions().values())
    return hashlib.sha256("\n".join((*parts, source_hash())).encode()).hexdigest()[:32]


def library_versions() -> dict[str, str]:
    """Of what kernels are written in."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {"torch": torch.__version__, "triton": triton}


@cache
def source_hash() -> str:
    """Of all kernels, which share code, and of this check."""
    files = [*Path(archsearch_kernels.__path__[0]).rglob("*.py"), Path(__file__)]
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda one: one.parts[-2:]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _verdict(
    name: str, backend: str, device: str, head_sizes: tuple[int, ...], dtype: torch.dtype
) -> KernelVerdict | None:
    one = family(name)
    return None if backend == REFERENCE else check(one, backend, device, head_sizes, dtype)


def check(
    one: Family,
    backend: str,
    device: torch.device | str,
    head_sizes: Iterable[int],
    dtype: torch.dtype,
) -> KernelVerdict:
    """Compare one backend with the reference over lengths, head sizes, and with a given state.

    Raises:
        LookupError: no such backend.
    """
    assert dtype != torch.float64, "there is no truth more exact than fp64"
    one.load(backend)
    checked = family(one.borrowed[backend]) if backend in one.borrowed else one
    findings = [
        finding
        for head_size in head_sizes
        for tokens in TOKENS
        for state in (False, True)
        for finding in _compare(
            checked,
            backend,
            Sizes(batch=2, tokens=tokens, heads=2, head_size=head_size, state=state),
            torch.device(device),
            dtype,
        )
    ]
    worst = max(findings, key=lambda finding: finding.ratio)
    return KernelVerdict(
        family=one.name,
        backend=backend,
        device=_device_name(torch.device(device)),
        dtype=str(dtype).removeprefix("torch."),
        ok=worst.ratio <= 1,
        forward_error=max(f.error for f in findings if not f.is_gradient),
        gradient_error=max((f.error for f in findings if f.is_gradient), default=math.inf),
        tolerance=worst.tolerance,
        worst=worst.name,
    )


def _compare(
    one: Family, backend: str, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> Iterator[_Finding]:
    call = one.make_inputs(sizes).cast(dtype, device)
    truth = _run(one, REFERENCE, call.cast(torch.float64, device))
    reference = _run(one, REFERENCE, call)
    try:
        found = _run(one, backend, call)
    except Exception as error:  # a compiler, a driver and a shape check raise what they like
        yield _Finding(f"a call, which raised {error!r}", False, math.inf, 1.0)
        return
    for name, exact in truth.items():
        own, theirs = reference[name], found[name]
        rounding = ONE_ROUNDING * torch.finfo(own.dtype).eps
        if dtype.itemsize < 4 and backend in one.operands:
            rounding += FACTORS * ONE_ROUNDING * torch.finfo(one.operands[backend]).eps
        reordered = REORDERED * max(1.0, sizes.head_size / 16) * torch.finfo(torch.float32).eps
        yield _Finding(
            name=name,
            is_gradient=name.startswith("gradient"),
            error=_error(theirs, exact),
            tolerance=2 * _error(own, exact) + rounding + reordered,
        )


def _run(one: Family, backend: str, call: Call) -> dict[str, Tensor]:
    """Outputs, and the gradient of every input for fixed random gradients of the outputs."""
    inputs = {name: x.detach().clone().requires_grad_() for name, x in call.tensors.items()}
    result = one.op(**inputs, **call.options, backend=backend)
    given = result if isinstance(result, tuple) else (result,)
    outputs = [y for y in given if y is not None]
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64).bfloat16().to(y)
        for y in outputs  # rounded to bf16, so that every dtype gets the same ones
    ]
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    gradients = torch.autograd.grad(
        outputs, list(inputs.values()), weights, allow_unused=True, materialize_grads=True
    )
    return named | {f"gradient of {n}": g for n, g in zip(inputs, gradients, strict=True)}


def _error(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference, relative to that of the truth; infinite if no number."""
    scale = float(exact.square().mean().sqrt())
    difference = float((found.to(exact) - exact).square().mean().sqrt())
    return difference / max(scale, SMALLEST_SCALE) if math.isfinite(difference) else math.inf


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

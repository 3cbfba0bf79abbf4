"""Linear layers over a few tokens on a CPU: the same product, in the one of several ways that is fastest here.

A verification multiplies every weight with a handful of tokens. For such narrow products `x @ W.T`, `(W @ x.T).T` and
oneDNN's own product differ by a factor of two and more, and which of them wins depends on the machine, the number of
tokens and the shape. So within `narrow_linears` each shape is computed every way on its first calls, which are real
work, and the fastest way is kept as long as the process lives, for this and similar numbers of tokens; [`settle`] has
it chosen beforehand.

Contract: results differ in rounding only, no weight is copied, and nothing changes outside of the scope or in other
threads. As the clock chooses, runs repeat up to rounding only; HF_DSPARK_STOCK_LINEAR=1 switches it off, for runs that
repeat to the bit.

Shape legend: N tokens, Din and Dout sizes of a layer.
"""

import functools
import itertools
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn
from torch.nn import functional as F  # TorchScript looks for it here, when it compiles the wrapped forward

MOST_TOKENS = 256  # from here on all ways are alike
SMALLEST_WEIGHT = 1 << 16  # smaller layers are done before the choice is made

_PLAIN = (nn.Parameter, torch.Tensor)  # subclasses may mean something else
_ORIGINAL = "_hf_dspark_original"  # where the wrapper keeps what it wraps
_ACTIVE: ContextVar[bool] = ContextVar("hf_dspark_narrow_linears", default=False)


Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _as_it_is(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(states, weight, bias)


def _flipped(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = states.reshape(-1, states.shape[-1])
    # Two tokens are often done sooner than one, for which matrix libraries take another path.
    columns = torch.cat([rows, rows]).t() if len(rows) == 1 else rows.t()
    product = torch.mm(weight, columns)[:, : len(rows)].t().contiguous()
    if bias is not None:
        product += bias
    return product.view(*states.shape[:-1], weight.shape[0])


def _onednn(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(states.contiguous(), weight, bias, "none", [], "")


def _switched_off() -> bool:
    return os.environ.get("HF_DSPARK_STOCK_LINEAR", "") not in ("", "0")


@functools.cache
def _has_onednn() -> bool:
    """Whether this build of torch has oneDNN's product of plain float32 tensors."""
    try:
        ones = torch.ones(1, 1, device="cpu", dtype=torch.float32)  # whatever the defaults are now
        return torch.backends.mkldnn.is_available() and bool((_onednn(ones, ones, None) == 1).all())
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


def ways(dtype: torch.dtype) -> list[Way]:
    """How products of this type can be computed, the usual way first."""
    if _switched_off():
        return [_as_it_is]
    # Of half precision, the usual way is oneDNN's.
    return [_as_it_is, _flipped, _onednn] if dtype is torch.float32 and _has_onednn() else [_as_it_is, _flipped]


class Choice:
    """
    Between `ways` for one shape.

    The shortest of some runs counts, since what disturbs a run only makes it longer. An unusual way has to win
    clearly.
    """

    RUNS, SECONDS = 3, 0.01  # of each way, at the least: the first runs of a process find cold caches and threads
    CLEARLY = 0.9

    def __init__(self, ways: Sequence[Way]) -> None:
        self.ways = ways
        self._seconds: list[list[float]] = [[] for _ in ways]
        self.way: Way | None = None

    def __call__(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Either the way that was found to be fastest, or one that was tried less often."""
        if self.way is not None:
            return self.way(states, weight, bias)
        index = min(range(len(self.ways)), key=lambda i: len(self._seconds[i]))
        began = time.perf_counter()
        product = self.ways[index](states, weight, bias)
        self.note(index, time.perf_counter() - began)
        return product

    def note(self, index: int, seconds: float) -> None:
        """Takes note of a run of a way; settles the choice after enough of them."""
        self._seconds[index].append(seconds)
        if min(map(len, self._seconds)) >= self.RUNS and min(map(sum, self._seconds)) >= self.SECONDS:
            usual, *unusual = map(min, self._seconds)
            best = min(unusual, default=usual)
            self.way = self.ways[1 + unusual.index(best)] if best < self.CLEARLY * usual else self.ways[0]


# Numbers of tokens up to the next of these share their choices.
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, MOST_TOKENS)
_CHOICES: dict[int, dict[tuple, Choice]] = {}  # by size, then by layer


@contextmanager
def narrow_linears(num_tokens: int) -> Iterator[None]:
    """
    Within it, in this thread, `nn.Linear` chooses. No gradients flow through what it computes.

    Args:
        num_tokens (`int`): N, of the forward that is to run. Many are no matter of choice.
    """
    if not 0 < num_tokens < MOST_TOKENS or _switched_off():
        yield
        return
    threads = torch.get_num_threads()
    known = [choice for key, choice in list(_CHOICES.get(_size(num_tokens), {}).items()) if key[-1] == threads]
    if known and all(choice.way is _as_it_is for choice in known):  # asking takes time, and there is nothing to gain
        yield
        return
    install_narrow_linear()
    token = _ACTIVE.set(True)
    try:
        with torch.no_grad():
            yield
    finally:
        _ACTIVE.reset(token)


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`states [..., Din]` times the transposed `weight [Dout, Din]`, plus `bias [Dout]`."""
    choice = _choice(states, weight, bias)
    return _as_it_is(states, weight, bias) if choice is None else choice(states, weight, bias)


def _choice(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Choice | None:
    """The choice for a product of few tokens and a large plain weight on a CPU; anything else takes the usual way."""
    if (
        weight.numel() < SMALLEST_WEIGHT
        or bias is not None
        and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype or not bias.is_contiguous())
        or type(weight) not in _PLAIN
        or weight.device.type != "cpu"
        or weight.dtype != states.dtype
        or torch.is_autocast_enabled("cpu")
    ):
        return None
    choices = _CHOICES.setdefault(_size(states.numel() // states.shape[-1]), {})
    key = (weight.shape, weight.dtype, torch.get_num_threads())
    choice = choices.get(key)
    if choice is None:
        choice = choices.setdefault(key, Choice(ways(weight.dtype)))
    return choice


@torch.no_grad()
def settle(model: nn.Module, most_tokens: int, *, most_seconds: float = 10.0) -> None:
    """
    Lets the layers of a model choose now, so that work to come is not slowed by it.

    Args:
        model (`nn.Module`): Its plain linear layers choose.
        most_tokens (`int`): For up to so many tokens, few first.
        most_seconds (`float`, *optional*): What is not chosen by then is chosen at work.
    """
    if _switched_off():
        return
    deadline = time.perf_counter() + most_seconds
    alike: dict[tuple, list[nn.Linear]] = {}
    for module in model.modules():
        if type(module).forward is nn.Linear.forward:  # no kind of its own, which may have no weight or another format
            weight, shape = getattr(module, "weight", None), (module.out_features, module.in_features)
            if weight is not None and type(weight) in _PLAIN and weight.is_floating_point() and weight.shape == shape:
                alike.setdefault((shape, weight.dtype), []).append(module)
    for size in _SIZES[: _size(min(most_tokens, MOST_TOKENS - 1)) + 1]:
        for layers in alike.values():
            states = layers[0].weight.new_ones(min(size, MOST_TOKENS - 1), layers[0].in_features)
            # One layer after the other, so that weights come out of memory as they do in decoding.
            for layer in itertools.cycle(layers):
                choice = _choice(states, layer.weight, layer.bias)
                if choice is None or choice.way is not None or time.perf_counter() > deadline:
                    break
                choice(states, layer.weight, layer.bias)


def _size(num_tokens: int) -> int:
    return bisect_left(_SIZES, num_tokens)


def install_narrow_linear() -> None:
    """Makes `nn.Linear` ask [`linear`] within [`narrow_linears`]. Idempotent."""
    original = nn.Linear.forward
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        # Not while compiling: a `ContextVar` cannot be traced, and a traced choice would outlive the scope.
        if torch.compiler.is_compiling() or not _ACTIVE.get():
            return original(self, input)
        return linear(input, self.weight, self.bias)

    setattr(forward, _ORIGINAL, original)
    nn.Linear.forward = forward


def uninstall_narrow_linear() -> None:
    """Undoes [`install_narrow_linear`]."""
    original = getattr(nn.Linear.forward, _ORIGINAL, None)
    if original is not None:
        nn.Linear.forward = original

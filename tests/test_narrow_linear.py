"""Narrow products: the same result whichever way is chosen, the faster way kept, nothing changed outside the scope."""

import threading

import pytest
import torch
from torch import nn

from hf_dspark import narrow_linear
from hf_dspark.narrow_linear import MOST_TOKENS, Choice, install_narrow_linear, narrow_linears, uninstall_narrow_linear

OUT, IN = 320, 256  # large enough to be worth a choice


@pytest.fixture(autouse=True)
def no_choices(monkeypatch):
    monkeypatch.setattr(narrow_linear, "_CHOICES", {})
    monkeypatch.setattr(Choice, "SECONDS", 0.0)  # a few runs are enough here


@pytest.fixture
def layer():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(IN, OUT).requires_grad_(False)


def states(*shape, seed=0):
    return torch.randn(*shape, IN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 2), (1, 24), (3, 7), (63,), (1, 255)])
@pytest.mark.parametrize("bias", [True, False])
def test_all_ways_compute_the_same(layer, shape, dtype, bias):
    layer = layer.to(dtype)
    if not bias:
        layer.bias = None
    given = states(*shape).to(dtype)
    expected = layer(given)
    with narrow_linears(8):
        outputs = [layer(given) for _ in range(4 * Choice.RUNS)]
    ((choice,),) = [choices.values() for choices in narrow_linear._CHOICES.values()]
    assert choice.way is not None
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    assert choice.ways == narrow_linear.ways(dtype)
    assert narrow_linear._flipped in choice.ways
    outputs += [way(given, layer.weight, layer.bias) for way in choice.ways]
    with torch.inference_mode():
        outputs += [way(given, layer.weight, layer.bias) for way in choice.ways]
    spread = torch.cat([given, given], -1)[..., ::2]  # not contiguous
    expected_spread = layer(spread)
    for way in choice.ways:
        torch.testing.assert_close(
            way(spread, layer.weight, layer.bias), expected_spread, rtol=tolerance, atol=tolerance
        )
    for output in outputs:
        assert output.shape == expected.shape
        assert output.dtype == dtype
        assert output.is_contiguous()
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((1.0, 0.5), 1),
        ((1.0, 0.95), 0),
        ((1.0, 1.0), 0),
        ((0.5, 1.0), 0),
        ((1.0,), 0),
        ((1.0, 0.5, 0.4), 2),
        ((1.0, 0.4, 0.5), 1),
        ((1.0, 2.0, 0.95), 0),
    ],
)
def test_an_unusual_way_has_to_win_clearly(seconds, chosen):
    ways = [object() for _ in seconds]
    choice = Choice(ways)
    for run in range(Choice.RUNS):
        assert choice.way is None
        for index, shortest in enumerate(seconds):
            choice.note(index, shortest + run)  # what disturbs a run makes it longer; the shortest counts
    assert choice.way is ways[chosen]


def test_short_runs_count_only_when_there_are_enough_of_them(monkeypatch):
    monkeypatch.setattr(Choice, "SECONDS", 0.01)
    ways = [object(), object()]
    choice = Choice(ways)
    for _ in range(9):
        choice.note(0, 0.001)
        choice.note(1, 0.0012)
        assert choice.way is None
    choice.note(0, 0.001)
    choice.note(1, 0.0005)  # at last
    assert choice.way is ways[1]


def test_all_ways_are_tried_before_one_is_kept(layer, monkeypatch):
    tried = []

    def noted(way):
        return lambda *args: tried.append(way) or way(*args)

    ways = narrow_linear.ways(torch.float32)
    monkeypatch.setattr(narrow_linear, "ways", lambda dtype: [noted(way) for way in ways])
    with narrow_linears(8):
        for _ in range(len(ways) * Choice.RUNS):
            layer(states(1, 8))
        assert tried == ways * Choice.RUNS  # in turn: what slows the machine for a while slows them all
        kept = set()
        for _ in range(5):
            layer(states(1, 8))
            kept.add(tried[-1])
        assert len(kept) == 1


def test_without_onednn_there_are_two_ways(layer, monkeypatch):
    def missing(*args):
        raise AttributeError("no such operator")

    assert len(narrow_linear.ways(torch.bfloat16)) == 2
    monkeypatch.setattr(narrow_linear, "_onednn", missing)
    narrow_linear._has_onednn.cache_clear()
    try:
        assert len(narrow_linear.ways(torch.float32)) == 2
        with narrow_linears(8):
            for _ in range(2 * Choice.RUNS):
                torch.testing.assert_close(
                    layer(states(1, 8)), nn.functional.linear(states(1, 8), layer.weight, layer.bias)
                )
    finally:
        narrow_linear._has_onednn.cache_clear()


@pytest.mark.parametrize("flips", [True, False])
def test_where_there_is_nothing_to_gain_nobody_is_asked_any_more(layer, flips, monkeypatch):
    with narrow_linears(8):
        layer(states(1, 8))
    ((choice,),) = [choices.values() for choices in narrow_linear._CHOICES.values()]
    choice.way = narrow_linear._flipped if flips else narrow_linear._as_it_is
    asked, linear = [], narrow_linear.linear
    monkeypatch.setattr(narrow_linear, "linear", lambda *args: asked.append(args) or linear(*args))
    with narrow_linears(8):
        layer(states(1, 8))
    assert bool(asked) is flips
    with narrow_linears(7):  # similar
        layer(states(1, 7))
    assert len(asked) == 2 * flips
    with narrow_linears(9):  # not known yet
        layer(states(1, 9))
    assert len(asked) == 2 * flips + 1


def test_many_tokens_take_the_usual_way(layer):
    with narrow_linears(MOST_TOKENS):
        assert layer(states(1, MOST_TOKENS)).equal(
            nn.functional.linear(states(1, MOST_TOKENS), layer.weight, layer.bias)
        )
    assert not narrow_linear._CHOICES


def test_layers_can_be_made_to_choose_beforehand(layer):
    class Wrapped(nn.Parameter):
        pass

    other = nn.Linear(IN, OUT, bias=False)
    odd = nn.Linear(2 * IN, OUT)
    odd.weight = Wrapped(odd.weight, requires_grad=False)
    model = nn.Sequential(layer, other, nn.Linear(4, 4), odd, nn.Linear(2 * IN, OUT, dtype=torch.bfloat16))
    narrow_linear.settle(model, 5)
    assert sorted(narrow_linear._CHOICES) == [narrow_linear._size(n) for n in (1, 2, 3, 4, 6)]
    for choices in narrow_linear._CHOICES.values():
        assert {key[0] for key in choices} == {(OUT, IN), (OUT, 2 * IN)}
        assert all(choice.way is not None for choice in choices.values())
    assert layer.weight.grad is None
    narrow_linear.settle(model, 10 * MOST_TOKENS)
    assert len(narrow_linear._CHOICES) == len(narrow_linear._SIZES)


class Packed(nn.Linear):
    """A quantised layer as some libraries have it: without a `weight`, or with one that is no matrix of numbers."""

    def __init__(self, weight=None):
        super().__init__(IN, OUT)
        del self.weight
        if weight is not None:
            self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, states):
        raise AssertionError("nobody asked")


def test_layers_of_other_kinds_are_left_out_beforehand(layer):
    eight_bit = torch.zeros(OUT, IN, dtype=torch.int8)
    kinds = [Packed(), Packed(eight_bit), nn.Linear(IN, OUT), nn.Linear(IN, OUT), nn.LazyLinear(OUT)]
    kinds[2].weight = None
    kinds[3].weight = nn.Parameter(eight_bit, requires_grad=False)
    narrow_linear.settle(nn.Sequential(*kinds), 4)
    assert not narrow_linear._CHOICES
    narrow_linear.settle(nn.Sequential(*kinds, layer), 1)
    assert len(narrow_linear._CHOICES[0]) == 1


def test_choosing_beforehand_takes_no_longer_than_allowed(layer):
    narrow_linear.settle(layer, 8, most_seconds=0.0)
    assert all(choice.way is None for choices in narrow_linear._CHOICES.values() for choice in choices.values())


@pytest.mark.parametrize(
    "bias", [torch.randn(2 * OUT)[::2], torch.randn(1).expand(OUT), torch.randn(1)], ids=["strided", "expanded", "one"]
)
def test_an_unusual_bias_takes_the_usual_way(layer, bias):
    layer.bias = None
    with narrow_linears(8):
        for _ in range(4 * Choice.RUNS):
            expected = nn.functional.linear(states(1, 8), layer.weight, bias)
            torch.testing.assert_close(narrow_linear.linear(states(1, 8), layer.weight, bias), expected)
    assert not narrow_linear._CHOICES


def test_other_numbers_of_threads_choose_for_themselves(layer, monkeypatch):
    with narrow_linears(8):
        layer(states(1, 8))
    ((choice,),) = [choices.values() for choices in narrow_linear._CHOICES.values()]
    choice.way = narrow_linear._as_it_is
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with narrow_linears(8):
        layer(states(1, 8))
    ((_, other),) = [choices.values() for choices in narrow_linear._CHOICES.values()]
    assert other is not choice and other.way is None


def test_where_new_tensors_go_by_default_does_not_matter():
    narrow_linear._has_onednn.cache_clear()
    usual = narrow_linear._has_onednn()
    narrow_linear._has_onednn.cache_clear()
    try:
        with torch.device("meta"):
            assert narrow_linear._has_onednn() is usual
    finally:
        narrow_linear._has_onednn.cache_clear()


def test_switched_off_nothing_is_chosen_beforehand(layer, monkeypatch):
    monkeypatch.setenv("HF_DSPARK_STOCK_LINEAR", "1")
    narrow_linear.settle(layer, 8)
    assert not narrow_linear._CHOICES
    assert len(narrow_linear.ways(torch.float32)) == 1


def test_small_layers_and_subclasses_of_a_parameter_take_the_usual_way(layer):
    class Wrapped(nn.Parameter):
        pass

    layer.weight = Wrapped(layer.weight, requires_grad=False)
    with narrow_linears(8):
        layer(states(1, 8))
        nn.Linear(4, 4)(torch.zeros(1, 8, 4))
    assert not narrow_linear._CHOICES


def test_nothing_happens_outside_the_scope_or_in_another_thread(layer):
    layer(states(1, 8))
    with narrow_linears(8):
        thread = threading.Thread(target=layer, args=(states(1, 8),))
        thread.start()
        thread.join()
    assert not narrow_linear._CHOICES
    layer.requires_grad_(True)(states(1, 8)).sum().backward()
    assert layer.weight.grad is not None


def test_the_environment_switches_it_off(layer, monkeypatch):
    monkeypatch.setenv("HF_DSPARK_STOCK_LINEAR", "1")
    with narrow_linears(8):
        layer(states(1, 8))
    assert not narrow_linear._CHOICES


def test_installing_twice_is_installing_once_and_can_be_undone():
    original = getattr(nn.Linear.forward, narrow_linear._ORIGINAL, nn.Linear.forward)
    install_narrow_linear()
    wrapper = nn.Linear.forward
    install_narrow_linear()
    assert nn.Linear.forward is wrapper is not original
    uninstall_narrow_linear()
    assert nn.Linear.forward is original
    install_narrow_linear()


def test_a_compiled_layer_is_left_alone(layer):
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with narrow_linears(8):
        torch.testing.assert_close(
            compiled(states(1, 8)), nn.functional.linear(states(1, 8), layer.weight, layer.bias)
        )
    assert not narrow_linear._CHOICES


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_still_compiles_linear_layers():
    install_narrow_linear()
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert scripted(torch.zeros(1, 2, 4)).shape == (1, 2, 4)


def test_autocast_has_its_way(layer):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(states(1, 8))
        with narrow_linears(8):
            outputs = [layer(states(1, 8)) for _ in range(2 * Choice.RUNS)]
    for output in outputs:
        assert output.dtype is expected.dtype is torch.bfloat16
        torch.testing.assert_close(output, expected, rtol=5e-2, atol=5e-2)

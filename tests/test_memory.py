"""Calls leave nothing behind."""

import gc
import weakref

import torch

from hf_dspark.decoding import Decoder

from .drafters import generate, left_padded, tiny_drafter
from .tiny import tiny_target


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_five_hundred_calls_on_one_drafter_leave_no_tensor_behind():
    target = tiny_target("qwen3")
    drafter, inputs = tiny_drafter(target), left_padded([3, 5])
    counts = []
    for call in range(500):
        generate(target, inputs, drafter, max_new_tokens=6, output_scores=True)
        if call in (20, 499):
            counts.append(live_tensors())
    assert counts[0] == counts[1]


def test_a_run_is_gone_when_generate_returns(monkeypatch):
    target, runs = tiny_target("qwen3"), []
    original = Decoder.run

    def watched(self):
        output = original(self)
        runs.extend(weakref.ref(thing) for thing in (self, self.cache, self.session))
        return output

    monkeypatch.setattr(Decoder, "run", watched)
    target.generate(**left_padded([4]), assistant_model=tiny_drafter(target), max_new_tokens=6, do_sample=False)
    gc.collect()
    assert runs and all(reference() is None for reference in runs)

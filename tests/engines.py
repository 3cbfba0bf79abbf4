"""What tests of the engine share: prompts, plain texts, and drafters that know them."""

from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_dspark import DSparkDrafter
from tests.drafters import scripted
from tests.tiny import PAD_ID, VOCAB_SIZE

_PLAIN: WeakKeyDictionary[PreTrainedModel, dict] = WeakKeyDictionary()
LENGTHS = (4, 9, 1, 17, 33, 2, 5, 40, 8, 3)


def prompts(lengths=LENGTHS, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[torch.Tensor]:
    """Random prompts `[S]` of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]


def plain(target: PreTrainedModel, prompt: torch.Tensor, **options) -> torch.Tensor:
    """
    What plain `generate` makes of one prompt, `[1, S + new]`; greedy unless `options` say otherwise. Greedy texts of
    plain settings are made once, as the tiny targets stay as they are.
    """
    options = {"do_sample": False, "max_new_tokens": 16} | options
    if options["do_sample"] or any(not isinstance(value, (int, float, list)) for value in options.values()):
        return target.generate(prompt[None], **options)
    texts, key = _PLAIN.setdefault(target, {}), (tuple(prompt.tolist()), repr(sorted(options.items())))
    if key not in texts:
        texts[key] = target.generate(prompt[None], **options)
    return texts[key].clone()


def knowing(drafter: DSparkDrafter, texts: list[torch.Tensor], right: int = 3) -> DSparkDrafter:
    """A view of `drafter` that drafts `right` tokens of whichever text the row is at, then wrong ones."""
    sequences = [text[0].tolist() for text in texts]

    def script(request: int, prefix: list[int], num_drafts: int) -> list[int]:
        text = next((s for s in sequences if s[: len(prefix)] == prefix), prefix)
        drafts = (text[len(prefix) :] + [PAD_ID] * num_drafts)[:num_drafts]
        return [token if depth < right else (token + 1) % VOCAB_SIZE for depth, token in enumerate(drafts)]

    return scripted(drafter, script)


def equal(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether texts are the same, one by one."""
    return [r.tolist() for r in results] == [e.tolist() for e in expected]

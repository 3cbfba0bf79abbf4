"""What the drafting session proposes in the middle of a batch is what the drafter says about the text so far."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from hf_dspark.drafting import DraftSession
from hf_dspark.target import TargetView
from tests.drafters import AUTOREGRESSIVE, assert_drafted, generate, k_oracle, left_padded, tiny_drafter
from tests.tiny import tiny_target

HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no Markov head": {"markov_rank": 0},
    "confidence without Markov embedding": {"confidence_head_with_markov": False},
    "layout B": {"sample_from_anchor": False},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "top-k head": {"draft_top_k": 6},
    "reduced vocabulary and top-k head": {"draft_vocab_size": 20, "draft_top_k": 6},
    "embeddings tapped": {"target_layer_ids": [1, -1, 0]},
    "sliding from the anchor, causal": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    "sliding with the slot": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 3,
        "sliding_window_origin": "slot",
        "sliding_block_causal": False,
    },
    "sliding, wider than the text": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 99},
    "gemma4": {"backbone": "gemma4", "final_logit_softcapping": 3.0, "embedding_scale": 2.0},
    "gemma4, keys as values": {"backbone": "gemma4", "attention_k_eq_v": True, "sample_from_anchor": False},
    "autoregressive": AUTOREGRESSIVE,
    "autoregressive without confidence": AUTOREGRESSIVE | {"enable_confidence_head": False},
    "autoregressive, reduced vocabulary and top-k head": AUTOREGRESSIVE | {"draft_vocab_size": 20, "draft_top_k": 6},
}


def slow_block(view, features, ids, previous):
    """Hidden states `[1, K, D]` of a parallel drafter, given the text's features `[1, T, M*Dt]` and the anchor."""
    config, length = view.drafter.config, ids.shape[1]
    block = torch.tensor([[int(previous[0, 0])] + [config.mask_token_id] * (config.block_size - 1)])
    hidden = view.drafter(
        view.noise_embeds(block),
        context_hidden_states=features,
        position_ids=torch.arange(length, length + config.block_size)[None],
        context_position_ids=torch.arange(length)[None],
    )
    return hidden[:, config.block_size - config.num_drafts :][:, : previous.shape[1]]


def slow_steps(view, features, ids, previous):
    """
    Hidden states `[1, K, D]` of an autoregressive drafter: before every step all entries from the first on are run
    again, each a token and the state before it, which is the target's up to the anchor and the drafter's own after it.
    """
    fused = view.drafter.fc(features)
    states, hidden = [fused.new_zeros(1, 1, fused.shape[2]), fused], []
    for step in range(previous.shape[1]):
        entries = torch.cat([ids, previous[:, : step + 1]], dim=1)
        length = entries.shape[1]
        causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
        positions = torch.arange(length)[None]
        output = view.drafter(view.noise_embeds(entries), torch.cat(states, dim=1), positions, causal)[:, -1:]
        states.append(output)
        hidden.append(view.drafter.norm(output))
    return torch.cat(hidden, dim=1)


def slow_logits(target, drafter, text, anchor_id, draft_ids):
    """
    Draft logits `[K, V]` and confidences `[K]` after `text` and an anchor, given the drafts: one dense forward of each
    model over everything, no cache, nothing packed.
    """
    view, config, num_drafts = TargetView(target, drafter), drafter.config, len(draft_ids)
    ids, previous = torch.tensor([text]), torch.tensor([[anchor_id, *draft_ids[:-1]]])
    slow_hidden = slow_steps if drafter.is_autoregressive else slow_block
    with torch.no_grad():
        hidden_states = target(ids, output_hidden_states=view.hidden_state_indices, use_cache=False).hidden_states
        hidden = slow_hidden(view, view.context_features(hidden_states), ids, previous)
        base = view.base_logits(hidden)
        logits, confidence = drafter.teacher_forced(hidden, base, previous)
    if config.draft_top_k is not None:
        kept = base.topk(config.draft_top_k, dim=-1).indices
        logits = torch.full_like(logits, float("-inf")).scatter(-1, kept, logits.gather(-1, kept))
    full = torch.full((num_drafts, config.vocab_size), float("-inf"))
    token_ids = drafter.draft_token_ids()
    full[:, torch.arange(config.vocab_size) if token_ids is None else token_ids] = logits[0]
    return full, None if confidence is None else confidence[0].sigmoid()


def ragged_batch(target, drafter):
    """Prompts, plain text that ends at different times, and options that end it there."""
    lengths = [1, 4, 9, 6]
    inputs = left_padded(lengths)
    text = generate(target, inputs, max_new_tokens=18).sequences
    eos = [int(text[row, 9 + index]) for row, index in ((0, 8), (2, 5))]
    options = {"max_new_tokens": 18, "eos_token_id": eos}
    plain = generate(target, inputs, **options).sequences
    assert len({tuple(row).index(0, 9) if 0 in row[9:] else 27 for row in plain.tolist()}) > 2
    return lengths, inputs, plain, options


def texts_before(rounds, prompts, first_ids):
    """For each round, the row's verified tokens: prompt without padding, and what was committed but the anchor."""
    written = [[*prompt, first] for prompt, first in zip(prompts, first_ids, strict=True)]
    for r in rounds:
        assert written[r.row][-1] == r.anchor_id
        yield r, written[r.row][:-1]
        written[r.row].extend(r.committed_ids)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_greedy_drafts_are_the_argmax_of_a_dense_run_from_scratch(head):
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, **head)
    lengths, inputs, plain, options = ragged_batch(target, drafter)
    output = generate(target, inputs, drafter, **options)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)
    prompts = [ids[-length:] for ids, length in zip(inputs["input_ids"].tolist(), lengths, strict=True)]
    for r, text in texts_before(output.rounds, prompts, plain[:, 9].tolist()):
        if not r.draft_ids:
            continue
        logits, confidence = slow_logits(target, drafter, text, r.anchor_id, r.draft_ids)
        assert tuple(logits.argmax(-1).tolist()) == r.draft_ids
        if confidence is not None:
            torch.testing.assert_close(torch.tensor(r.confidence), confidence, atol=1e-4, rtol=0)


def test_the_context_is_right_whatever_was_accepted_and_whoever_has_ended():
    """An oracle makes rounds of all lengths; the confidences are still the real drafter's."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    lengths, inputs, plain, options = ragged_batch(target, drafter)
    output = generate(target, inputs, k_oracle(drafter, plain, right=lambda row: row), **options)
    assert torch.equal(output.sequences, plain)
    assert len({len(r.committed_ids) for r in output.rounds}) > 3
    prompts = [ids[-length:] for ids, length in zip(inputs["input_ids"].tolist(), lengths, strict=True)]
    for r, text in texts_before(output.rounds, prompts, plain[:, 9].tolist()):
        if r.draft_ids:
            # The confidence of the first position depends on the whole context, and on no draft.
            _, confidence = slow_logits(target, drafter, text, r.anchor_id, r.draft_ids)
            torch.testing.assert_close(torch.tensor(r.confidence[0]), confidence[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["vocabulary free", "token by token"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_reported_probabilities_are_those_of_a_dense_run_after_the_processors(head, options, monkeypatch):
    target, inputs = tiny_target("llama"), left_padded([7])
    drafter = tiny_drafter(target, **head)
    recorded, propose = [], DraftSession.propose

    def recording(self, *args, **kwargs):
        recorded.append(propose(self, *args, **kwargs))
        return recorded[-1]

    monkeypatch.setattr(DraftSession, "propose", recording)
    torch.manual_seed(0)
    output = generate(target, inputs, drafter, do_sample=True, temperature=0.7, top_k=9, max_new_tokens=10, **options)
    assert_drafted(output.rounds)
    prompt = inputs["input_ids"][0].tolist()
    rounds = texts_before(output.rounds, [prompt], [int(output.sequences[0, 7])])
    for (r, text), drafts in zip([pair for pair in rounds if pair[0].draft_ids], recorded, strict=True):
        logits, _ = slow_logits(target, drafter, text, r.anchor_id, r.draft_ids)
        ids = [*text, r.anchor_id]
        for position, draft_id in enumerate(r.draft_ids):
            scores = logits[position : position + 1].clone()
            if options:
                seen = torch.tensor(sorted({*ids, *r.draft_ids[:position]}))
                scores[0, seen] = torch.where(scores[0, seen] < 0, scores[0, seen] * 1.3, scores[0, seen] / 1.3)
            scores = TopKLogitsWarper(9)(None, TemperatureLogitsWarper(0.7)(None, scores))
            reported = torch.zeros(drafter.config.vocab_size)
            columns = torch.arange(drafter.config.vocab_size) if drafts.token_ids is None else drafts.token_ids
            reported[columns] = drafts.probs[0, position]
            torch.testing.assert_close(reported, scores[0].softmax(-1), atol=1e-4, rtol=0)
            assert reported[draft_id] > 0

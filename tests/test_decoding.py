"""The decoding loop, from the outside: batches, greedy parity, and the exact law of sampled text."""

import collections
import dataclasses
import itertools

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dspark import ConfidenceThreshold, FixedLength, Scheduler, decoding
from hf_dspark.decoding import Decoder
from hf_dspark.drafting import DraftSession
from tests.drafters import (
    AUTOREGRESSIVE,
    BigramPair,
    anti_oracle,
    assert_drafted,
    generate,
    k_oracle,
    left_padded,
    oracle,
    scripted,
    tiny_drafter,
)
from tests.reference import BestInHindsight, BranchSource, law_of, total_variation
from tests.tiny import PAD_ID, tiny_target

LENGTHS = [1, 3, 9, 17]
HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no Markov head": {"markov_rank": 0},
    "no confidence head": {"enable_confidence_head": False},
    "layout B": {"sample_from_anchor": False},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "top-k head": {"draft_top_k": 6},
    "reduced vocabulary and top-k head": {"draft_vocab_size": 20, "draft_top_k": 6},
    "embeddings tapped": {"target_layer_ids": [-1, 1]},
    "autoregressive": AUTOREGRESSIVE,
    "autoregressive, no confidence head": AUTOREGRESSIVE | {"enable_confidence_head": False},
    "autoregressive, reduced vocabulary": AUTOREGRESSIVE | {"draft_vocab_size": 20},
}


def drafts_by_row(rounds):
    """What was drafted in each row, round by round."""
    drafts = collections.defaultdict(list)
    for r in rounds:
        drafts[r.row].append((r.anchor_id, r.draft_ids, r.num_accepted))
    return drafts


# ------------------------------------------------------------------------------------------------------- batch


def test_each_row_of_a_padded_batch_is_its_own_single_row_run_with_pads_after_its_end():
    target, inputs = tiny_target("llama"), left_padded(LENGTHS)
    text = generate(target, inputs, max_new_tokens=20).sequences[:, max(LENGTHS) :]
    eos = sorted({int(text[0, 6]), int(text[2, 13])})
    singles = []
    for row, length in enumerate(LENGTHS):
        single = {"input_ids": inputs["input_ids"][row : row + 1, -length:]}
        singles.append(generate(target, single, max_new_tokens=20, eos_token_id=eos).sequences[0, length:].tolist())
    padded = [single + [PAD_ID] * (20 - len(single)) for single in singles]
    plain = torch.cat([inputs["input_ids"], torch.tensor(padded)], dim=1)
    assert len({len(single) for single in singles}) > 2  # rows that end early, and rows that do not
    drafter = tiny_drafter(target)
    for view in (drafter, oracle(drafter, plain), k_oracle(drafter, plain, right=lambda row: row)):
        output = generate(target, inputs, view, max_new_tokens=20, eos_token_id=eos)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)


def test_a_rejected_neighbour_leaves_no_trace_in_the_logits_of_a_row():
    target, inputs = tiny_target("llama"), left_padded([6, 11])
    plain = generate(target, inputs, max_new_tokens=12).sequences
    single = {"input_ids": inputs["input_ids"][1:]}
    clean = generate(target, single, max_new_tokens=12, output_logits=True).logits
    drafter = k_oracle(tiny_drafter(target), plain, right=lambda row: 0 if row else 9)
    output = generate(target, inputs, drafter, max_new_tokens=12, output_logits=True)
    assert sum(r.row == 1 for r in output.rounds) >= 10
    assert_drafted(output.rounds)
    for logits, expected in zip(output.logits, clean, strict=True):
        torch.testing.assert_close(logits[1], expected[0], atol=1e-5, rtol=0)


def test_each_verification_feeds_a_row_contiguous_positions_from_its_anchor(monkeypatch):
    target, inputs = tiny_target("llama"), left_padded(LENGTHS)
    plain = generate(target, inputs, max_new_tokens=20).sequences
    fed, packed_forward = [], decoding.packed_forward

    def recording(model, input_ids, position_ids, *, layout, **kwargs):
        fed.append((position_ids[0].tolist(), layout.query_lengths))
        return packed_forward(model, input_ids, position_ids, layout=layout, **kwargs)

    monkeypatch.setattr(decoding, "packed_forward", recording)
    output = generate(target, inputs, k_oracle(tiny_drafter(target), plain, lambda row: row), max_new_tokens=20)
    assert_drafted(output.rounds)
    anchors = list(LENGTHS)  # position of each row's newest token: the prompt is followed by the prefill's token
    rounds = collections.defaultdict(list)
    for r in output.rounds:
        rounds[r.step].append(r)
    for step, (positions, query_lengths) in enumerate(fed):
        for r, query_length in zip(rounds[step], query_lengths, strict=True):
            own, positions = positions[:query_length], positions[query_length:]
            assert own == list(range(anchors[r.row], anchors[r.row] + 1 + r.verify_length))
            anchors[r.row] += len(r.committed_ids)
        assert positions == []


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_rows_with_one_prompt_draft_alike_whatever_the_batch_size(head):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, **head)
    plain = generate(target, left_padded([7]), max_new_tokens=20).sequences
    single = None
    for batch_size in (1, 2, 8):
        inputs = {name: value.repeat(batch_size, 1) for name, value in left_padded([7]).items()}
        output = generate(target, inputs, drafter, max_new_tokens=20)
        assert_drafted(output.rounds)
        assert torch.equal(output.sequences, plain.expand(batch_size, -1))
        drafts = drafts_by_row(output.rounds)
        single = single or drafts[0]
        assert all(drafts[row] == single for row in range(batch_size))


def test_the_accepted_length_does_not_depend_on_the_batch_size():
    target = tiny_target("llama")
    plain = generate(target, left_padded([7]), max_new_tokens=40).sequences
    accepted_lengths = set()
    for batch_size in (1, 2, 8):
        inputs = {name: value.repeat(batch_size, 1) for name, value in left_padded([7]).items()}
        drafter = k_oracle(tiny_drafter(target), plain.expand(batch_size, -1), right=2)
        accepted_lengths.add(generate(target, inputs, drafter, max_new_tokens=40).stats.accepted_length)
    assert accepted_lengths == {3.0}


def test_prompts_of_2_and_200_tokens_share_a_batch():
    target, inputs = tiny_target("llama"), left_padded([2, 200])
    plain = generate(target, inputs, max_new_tokens=24).sequences
    for right in (lambda row: 4 * row, lambda row: 4 - 4 * row):
        output = generate(target, inputs, k_oracle(tiny_drafter(target), plain, right), max_new_tokens=24)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)


class Recording(Scheduler):
    """The whole block, and what it was asked."""

    def __init__(self):
        self.requests = []

    def verify_lengths(self, request):
        self.requests.append(request)
        return list(request.max_lengths)


def test_rows_that_have_ended_are_neither_scheduled_nor_verified():
    target, inputs = tiny_target("llama"), left_padded([4] * 8)
    drafter, scheduler = tiny_drafter(target), Recording()
    ends = {row: 4 + 5 * (row + 1) for row in range(8)}  # 5, 10, ..., 40 new tokens

    def stop(ids, scores):
        return torch.tensor([len(row) >= ends[rows.index(row[:4].tolist())] for row in ids])

    rows = inputs["input_ids"].tolist()
    plain = generate(target, inputs, max_new_tokens=40).sequences
    view = oracle(drafter, plain).with_options(scheduler=scheduler)
    output = generate(target, inputs, view, max_new_tokens=40, stopping_criteria=[stop], pad_token_id=PAD_ID)
    for row, end in ends.items():
        assert torch.equal(output.sequences[row, :end], plain[row, :end])
        assert (output.sequences[row, end:] == PAD_ID).all()
    assert_drafted(output.rounds)
    for step, request in enumerate(scheduler.requests):
        served = [r for r in output.rounds if r.step == step]
        assert list(request.rows) == [r.row for r in served]
        assert len(request.confidence) == len(request.max_lengths) == len(served)
        assert {r.batch_tokens for r in served} == {sum(1 + r.verify_length for r in served)}
        for r in served:
            so_far = sum(len(o.committed_ids) for o in output.rounds if o.row == r.row and o.step < step)
            assert 4 + 1 + so_far < ends[r.row]


# ----------------------------------------------------------------------------------------------- greedy parity


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_every_kind_of_drafter_leaves_greedy_text_as_it_is(head):
    target, inputs = tiny_target("qwen3"), left_padded(LENGTHS)
    drafter = tiny_drafter(target, **head)
    plain = generate(target, inputs, max_new_tokens=20).sequences
    output = generate(target, inputs, drafter, max_new_tokens=20)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)
    assert {len(r.draft_ids) for r in output.rounds if r.step == 0} == {drafter.config.num_drafts}
    assert all(len(r.confidence) == len(r.draft_ids) * drafter.config.enable_confidence_head for r in output.rounds)
    if (draft_token_ids := drafter.draft_token_ids()) is not None:
        assert {token for r in output.rounds for token in r.draft_ids} <= set(draft_token_ids.tolist())


def test_100_prompts_give_plain_generates_tokens_in_float32():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    for seed in range(4):
        inputs = left_padded([1 + (7 * row + seed) % 24 for row in range(25)], seed=seed)
        plain = generate(target, inputs, max_new_tokens=16).sequences
        view = k_oracle(drafter, plain, right=lambda row: row % 6)
        output = generate(target, inputs, view, max_new_tokens=16)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)


def test_one_token_is_enough_of_a_prompt():
    target, inputs = tiny_target("llama"), left_padded([1])
    plain = generate(target, inputs, max_new_tokens=64).sequences
    for view in (tiny_drafter(target), oracle(tiny_drafter(target), plain)):
        output = generate(target, inputs, view, max_new_tokens=64)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_only_where_the_two_best_tokens_nearly_tie(dtype):
    target = tiny_target("llama", num_hidden_layers=4)
    target = type(target).from_pretrained(None, config=target.config, state_dict=target.state_dict(), dtype=dtype)
    drafter = tiny_drafter(target)
    assert drafter.fc.weight.dtype == dtype
    near_tie = 4 * torch.finfo(dtype).eps  # relative to the logits: a few roundings
    identical = 0
    for seed in range(10, 20):
        inputs = left_padded([9], seed=seed)
        plain = generate(target, inputs, max_new_tokens=24, output_logits=True)
        sequences = plain.sequences.clone()

        def script(row, prefix, num_drafts, sequences=sequences):
            return (sequences[0, len(prefix) :].tolist() + [5] * num_drafts)[:num_drafts]

        output = generate(target, inputs, scripted(drafter, script), max_new_tokens=24)
        assert_drafted(output.rounds)
        if torch.equal(output.sequences, plain.sequences):
            identical += 1
            continue
        first = int((output.sequences != plain.sequences)[0].nonzero()[0]) - 9
        best, second = plain.logits[first][0].topk(2).values.tolist()
        assert best - second <= near_tie * abs(best)
    assert identical >= 7


# ------------------------------------------------------------------------------------------ sampling: exact laws


class AfterTheFirstToken(BranchSource):
    """Leaves the token of the prefill, which is not speculated on, as it is given; branches over all that follows."""

    def __init__(self, source, first_ids):
        self._source, self._first_ids = source, first_ids

    def categorical(self, probs):
        first_ids, self._first_ids = self._first_ids, None
        return self._source.categorical(probs) if first_ids is None else torch.tensor(first_ids)

    def accept(self, target_prob, draft_prob):
        return self._source.accept(target_prob, draft_prob)


class EnoughRounds(Exception):
    """Ends a run from its callback."""


TINIEST = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


def enumeration_pair(vocab_size, **overrides):
    """A target whose every token has a chance, and a drafter of two tokens a round whose confidences vary."""
    target = tiny_target("llama", vocab_size=vocab_size, initializer_range=0.3, bos_token_id=None, **TINIEST)
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    drafter = tiny_drafter(target, **{"seed": 1, "block_size": 2, "num_hidden_layers": 1, **heads, **overrides})
    drafter.confidence_head.proj.weight.data.mul_(4)
    return target, drafter


def run_decoder(target, drafter, prompts, source, num_new_tokens, warpers=()):
    """The real decoder on real models; the new tokens of each row."""
    input_ids = torch.tensor(prompts)
    generation_config = GenerationConfig(do_sample=True, return_dict_in_generate=True)
    with torch.no_grad():
        return Decoder(
            target,
            drafter,
            input_ids,
            logits_processor=LogitsProcessorList(warpers),
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(input_ids.shape[1] + num_new_tokens)]),
            generation_config=generation_config,
            model_kwargs={"cache": DynamicCache(config=target.config), "logits_to_keep": 1},
            random_source=source,
        ).run()


def law_of_decoding(target, drafter, prompts, first_ids, num_new_tokens, num_rounds=None, **kwargs):
    """
    Exact law of each row's new tokens given the first ones, of all rounds or of the first `num_rounds` of them.
    """
    verify_lengths = set()

    def run(source):
        tokens = [[token] for token in first_ids]

        def on_round(r):
            tokens[r.row].extend(r.committed_ids)
            verify_lengths.add(r.verify_length)
            if num_rounds is not None and r.step + 1 == num_rounds and r.row == len(prompts) - 1:
                raise EnoughRounds

        view = drafter.with_options(on_round=on_round)
        try:
            run_decoder(target, view, prompts, AfterTheFirstToken(source, first_ids), num_new_tokens, **kwargs)
        except EnoughRounds:
            pass
        return tuple(map(tuple, tokens))

    law = law_of(run)
    assert sum(law.values()) == pytest.approx(1)
    return law, verify_lengths


def target_law(target, prompt, tokens, num_new_tokens, warpers=()):
    """Law of the target's text after `prompt` and the given first tokens, by plain forwards."""
    law = {tuple(tokens): 1.0}
    for _ in range(num_new_tokens - len(tokens)):
        prefixes = list(law)
        ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
        with torch.no_grad():
            scores = target(ids).logits[:, -1].float()
        for warper in warpers:
            scores = warper(None, scores)
        law = {
            (*prefix, token): law[prefix] * share
            for prefix, shares in zip(prefixes, scores.softmax(-1).tolist(), strict=True)
            for token, share in enumerate(shares)
            if share > 0
        }
    return law


def distance_to_target(law, target, prompts, num_new_tokens, warpers=()):
    """Total variation between a law, continued by the target where it is short, and the target's own."""
    completed, expected = collections.defaultdict(float), collections.defaultdict(float)
    for rows, probability in law.items():
        continued = [
            target_law(target, prompt, tokens, num_new_tokens, warpers).items()
            for prompt, tokens in zip(prompts, rows, strict=True)
        ]
        for combination in itertools.product(*continued):
            share = torch.tensor([p for _, p in combination], dtype=torch.float64).prod().item()
            completed[tuple(tokens for tokens, _ in combination)] += probability * share
    first_ids = [tokens[0] for tokens in next(iter(law))]
    own = [
        target_law(target, prompt, [first], num_new_tokens, warpers).items()
        for prompt, first in zip(prompts, first_ids, strict=True)
    ]
    for combination in itertools.product(*own):
        share = torch.tensor([p for _, p in combination], dtype=torch.float64).prod().item()
        expected[tuple(tokens for tokens, _ in combination)] += share
    return total_variation(completed, expected)


EXACT = 1e-6
POLICIES = {
    "fixed": FixedLength(),
    "fixed 1": FixedLength(1),
    "nothing": FixedLength(0),
    "threshold": ConfidenceThreshold(0.5),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_text_has_exactly_the_targets_law_over_several_rounds(policy):
    target, drafter = enumeration_pair(2)
    view = drafter.with_options(scheduler=POLICIES[policy])
    law, verify_lengths = law_of_decoding(target, view, [[1, 0]], [1], num_new_tokens=4)
    assert len(law) == 8
    assert distance_to_target(law, target, [[1, 0]], 4) < EXACT
    expected = {"fixed": {0, 1, 2}, "fixed 1": {0, 1}, "nothing": {0}, "threshold": {0, 1, 2}}
    assert verify_lengths == expected[policy]


# With a threshold at which the first draft decides whether the second is verified (but in the reduced vocabulary).
DRAFTERS = {
    "reduced vocabulary": ({"draft_vocab_size": 2}, 0.3),
    "top-k head": ({"draft_top_k": 2}, 0.7),
    "rnn": ({"seed": 5, "markov_head_type": "rnn", "confidence_temperatures": {"sampling": [0.5, 2.0]}}, 0.22),
    "layout B": ({"block_size": 3, "sample_from_anchor": False}, 0.58),
    "autoregressive": (AUTOREGRESSIVE, 0.06),
}


@pytest.mark.parametrize(("head", "threshold"), DRAFTERS.values(), ids=DRAFTERS.keys())
@pytest.mark.parametrize("policy", ["fixed", "threshold"])
def test_a_round_of_any_drafter_leaves_the_law_to_the_target(head, threshold, policy):
    target, drafter = enumeration_pair(3, **head)
    view = drafter.with_options(scheduler=FixedLength() if policy == "fixed" else ConfidenceThreshold(threshold))
    law, verify_lengths = law_of_decoding(target, view, [[1, 2]], [0], num_new_tokens=4, num_rounds=1)
    assert distance_to_target(law, target, [[1, 2]], 4) < EXACT
    assert max(verify_lengths) == 2
    assert len(verify_lengths) == 1 or policy == "threshold"


@pytest.mark.parametrize("scheduler", [FixedLength(), ConfidenceThreshold(0.42)], ids=["fixed", "threshold"])
def test_two_rows_are_independent_and_each_has_the_targets_law(scheduler):
    target, drafter = enumeration_pair(2)
    view, prompts = drafter.with_options(scheduler=scheduler), [[1, 0], [0, 1]]
    law, verify_lengths = law_of_decoding(target, view, prompts, [1, 0], num_new_tokens=4, num_rounds=1)
    assert distance_to_target(law, target, prompts, 4) < EXACT
    assert verify_lengths == ({2} if scheduler == FixedLength() else {1, 2})


def test_warped_text_has_exactly_the_warped_targets_law():
    target, drafter = enumeration_pair(4)
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3), TopPLogitsWarper(0.9)]
    law, verify_lengths = law_of_decoding(
        target, drafter, [[1, 2]], [3], num_new_tokens=4, num_rounds=1, warpers=warpers
    )
    assert distance_to_target(law, target, [[1, 2]], 4, warpers) < EXACT
    assert 2 in verify_lengths


def test_a_retrospective_schedule_changes_the_law():
    """The control: these enumerations can fail."""
    target, drafter = enumeration_pair(2)
    view = drafter.with_options(scheduler=BestInHindsight([1.0, 2.0, 2.1]))
    law, verify_lengths = law_of_decoding(target, view, [[1, 0]], [1], num_new_tokens=4, num_rounds=1)
    assert len(verify_lengths) > 1
    assert distance_to_target(law, target, [[1, 0]], 4) > 1e-3


def test_claiming_unprocessed_draft_probs_changes_the_law(claim_raw_probs):
    target, drafter = enumeration_pair(4)
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3), TopPLogitsWarper(0.9)]
    law, _ = law_of_decoding(target, drafter, [[1, 2]], [3], num_new_tokens=4, num_rounds=1, warpers=warpers)
    assert distance_to_target(law, target, [[1, 2]], 4, warpers) > 1e-3


# --------------------------------------------------------------------------------------------- sampling: draws


@pytest.fixture
def claim_raw_probs(monkeypatch):
    """Makes sessions report the distributions before the processors, not those the drafts were drawn from."""
    raw, processed, propose = [], DraftSession._processed, DraftSession.propose

    def recording(self, logits, *args):
        raw.append(logits.softmax(-1))
        return processed(self, logits, *args)

    def claiming(self, *args, **kwargs):
        raw.clear()
        drafts = propose(self, *args, **kwargs)
        return dataclasses.replace(drafts, probs=torch.stack(raw, dim=1))

    monkeypatch.setattr(DraftSession, "_processed", recording)
    monkeypatch.setattr(DraftSession, "propose", claiming)


WARPED = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}


def chi_square_of_three_tokens(num_rows=1500, num_calls=2):
    """Statistic of the first three sampled tokens against their exact law, and its degrees of freedom."""
    target = tiny_target("llama", vocab_size=16)
    drafter = tiny_drafter(target, block_size=2)
    prompt, rounds = [4, 9, 2], []
    counts = collections.Counter()
    for seed in range(num_calls):
        view = drafter.with_options(generator=torch.Generator().manual_seed(seed), on_round=rounds.append)
        text = target.generate(
            torch.tensor([prompt]), assistant_model=view, max_new_tokens=4, num_return_sequences=num_rows, **WARPED
        )
        counts.update(map(tuple, text[:, 3:6].tolist()))
    assert_drafted(rounds)
    assert 0.02 < sum(r.num_accepted for r in rounds) / sum(r.verify_length for r in rounds) < 0.98
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.9)]
    law = target_law(target, prompt, [], 3, warpers)
    assert sum(law.values()) == pytest.approx(1, abs=1e-4)
    expected = {tokens: share * num_rows * num_calls for tokens, share in law.items()}
    frequent = [tokens for tokens, count in expected.items() if count >= 5]
    cells = [(counts[tokens], expected[tokens]) for tokens in frequent]
    rest = sum(expected.values()) - sum(e for _, e in cells)
    cells.append((sum(counts.values()) - sum(observed for observed, _ in cells), max(rest, 1e-3)))
    return sum((observed - e) ** 2 / e for observed, e in cells), len(cells) - 1


def p_value(statistic, degrees_of_freedom):
    """Upper tail of the chi-square distribution."""
    half = torch.tensor([degrees_of_freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def test_the_joint_law_of_three_sampled_tokens_passes_a_chi_square_test():
    statistic, degrees_of_freedom = chi_square_of_three_tokens()
    assert degrees_of_freedom > 8
    assert p_value(statistic, degrees_of_freedom) > 1e-3


def test_the_chi_square_test_sees_unprocessed_draft_probs(claim_raw_probs):
    assert p_value(*chi_square_of_three_tokens()) < 1e-6


def test_a_drafter_equal_to_the_target_is_always_accepted_at_temperature_1():
    pair = BigramPair(tiny_target("llama", initializer_range=0.21))
    inputs = left_padded([3, 6, 2])
    output = generate(
        pair.target, inputs, pair.drafter, max_new_tokens=40, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    assert_drafted(output.rounds)
    assert output.stats.verify_rate == 1.0
    assert len({r.draft_ids for r in output.rounds}) > 10


@pytest.mark.parametrize("prompt_lengths", [[5], [5, 1, 8]], ids=["batch 1", "batch 3"])
def test_sampling_without_any_processor_draws_other_text_for_other_seeds_and_the_same_for_the_same(prompt_lengths):
    target, inputs = tiny_target("llama"), left_padded(prompt_lengths)
    drafter, outputs = tiny_drafter(target), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(
            generate(target, inputs, drafter, max_new_tokens=12, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        )
        assert_drafted(outputs[-1].rounds)
    first, again, other = ([r.draft_ids for r in output.rounds] for output in outputs)
    assert first == again != other
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert not torch.equal(outputs[0].sequences, outputs[2].sequences)


def test_a_views_own_generator_decides_and_leaves_the_global_one_alone():
    target, inputs = tiny_target("llama"), left_padded([5])
    texts, state = [], torch.get_rng_state()
    for seed in (1, 1, 2):
        view = tiny_drafter(target).with_options(generator=torch.Generator().manual_seed(seed))
        texts.append(generate(target, inputs, view, max_new_tokens=12, do_sample=True, top_k=0).sequences.tolist())
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sampled_run_without_drafts_writes_one_token_a_round():
    target, inputs = tiny_target("llama"), left_padded([5, 2])
    view = tiny_drafter(target).with_options(scheduler=FixedLength(0))
    output = generate(target, inputs, view, max_new_tokens=12, do_sample=True)
    assert output.sequences.shape[1] == 5 + 12
    assert {len(r.committed_ids) for r in output.rounds} == {1}
    assert output.stats.num_rounds == 2 * 11


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("moment", [0, 4])
def test_nan_logits_are_an_error_that_names_the_round(do_sample, moment):
    target, inputs = tiny_target("llama"), left_padded([5, 4])
    drafter, calls = tiny_drafter(target, draft_vocab_size=20), itertools.count()
    generate(target, inputs, drafter, max_new_tokens=1)  # a target's first call also tries whether it can be packed

    def spoil(module, args, logits):
        return torch.full_like(logits, float("nan")) if next(calls) >= moment else logits

    handle = target.lm_head.register_forward_hook(spoil)
    try:
        with pytest.raises(ValueError, match="nan in round 3" if moment else "nan in the prefill"):
            generate(target, inputs, drafter, max_new_tokens=40, do_sample=do_sample)
    finally:
        handle.remove()


# ------------------------------------------------------------------------------------------------------ options


def test_schedules_and_limits_decide_how_much_is_verified():
    target, inputs = tiny_target("llama"), left_padded([5, 2])
    plain = generate(target, inputs, max_new_tokens=20).sequences
    drafter = oracle(tiny_drafter(target), plain)
    for options, longest in (
        ({"scheduler": FixedLength(3)}, 3),
        ({"max_draft_tokens": 2}, 2),
        ({"scheduler": FixedLength(4), "max_draft_tokens": 3}, 3),
        ({}, 5),
    ):
        output = generate(target, inputs, drafter.with_options(**options), max_new_tokens=20)
        assert torch.equal(output.sequences, plain)
        assert max(r.verify_length for r in output.rounds) == longest
        assert {len(r.draft_ids) for r in output.rounds if r.step == 0} == {longest}


def test_a_threshold_verifies_up_to_the_first_confidence_below_it():
    target, inputs = tiny_target("llama"), left_padded([5, 2, 9])
    drafter = tiny_drafter(target)
    free = generate(target, inputs, drafter, max_new_tokens=20)
    threshold = sorted(c for r in free.rounds for c in r.confidence)[len(free.rounds)]
    view = drafter.with_options(scheduler=ConfidenceThreshold(threshold))
    output = generate(target, inputs, view, max_new_tokens=20)
    assert torch.equal(output.sequences, free.sequences)
    assert_drafted(output.rounds)
    room = dict.fromkeys(range(3), 19)
    for r in output.rounds:
        below = [position for position, c in enumerate(r.confidence) if c < threshold]
        limit = min(len(r.draft_ids), room[r.row] - 1)
        assert r.verify_length == min([*below, limit])
        room[r.row] -= len(r.committed_ids)
    assert len({r.verify_length for r in output.rounds}) > 2


def test_confidence_temperatures_of_the_mode_divide_the_logits():
    target, inputs = tiny_target("llama"), left_padded([5])
    raw = generate(target, inputs, tiny_drafter(target), max_new_tokens=3).rounds[0].confidence
    temperatures = {"greedy": [0.5, 1.0, 2.0, 3.0, 4.0], "sampling": [9.0] * 5}
    drafter = tiny_drafter(target, confidence_temperatures=temperatures)
    calibrated = generate(target, inputs, drafter, max_new_tokens=7).rounds[0].confidence
    expected = (torch.tensor(raw).logit() / torch.tensor(temperatures["greedy"][: len(raw)])).sigmoid()
    torch.testing.assert_close(torch.tensor(calibrated[: len(raw)]), expected)


def test_a_confidence_policy_without_a_confidence_head_is_an_error():
    target = tiny_target("llama")
    view = tiny_drafter(target, enable_confidence_head=False).with_options(scheduler=ConfidenceThreshold(0.5))
    with pytest.raises(ValueError, match="confidence head"):
        generate(target, left_padded([5]), view, max_new_tokens=4)


@pytest.mark.parametrize("lengths", [[9, 9], [-1, 0], [1]])
def test_a_scheduler_out_of_its_limits_is_an_error(lengths):
    class Broken(Scheduler):
        def verify_lengths(self, request):
            return lengths

    target = tiny_target("llama")
    with pytest.raises(ValueError, match="returned verify lengths"):
        generate(target, left_padded([5, 2]), tiny_drafter(target).with_options(scheduler=Broken()), max_new_tokens=9)


def test_an_anti_oracle_costs_rounds_but_no_token():
    target, inputs = tiny_target("llama"), left_padded([5, 2])
    plain = generate(target, inputs, max_new_tokens=20).sequences
    output = generate(target, inputs, anti_oracle(tiny_drafter(target), plain), max_new_tokens=20)
    assert torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)
    assert output.stats.accepted_length == 1.0

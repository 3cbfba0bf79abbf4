"""Prepared data: the target's own text, the same whether or not the run was stopped on the way."""

import copy
import json

import pytest
import torch

from hf_dspark import FixedLength
from hf_dspark.chats import prompt_ids
from hf_dspark.preparation import Sampling, batch_seed, prepare_data
from hf_dspark.prompt_sets import PromptSet, read_jsonl
from tests.drafters import tiny_drafter
from tests.tiny import tiny_target
from tests.tokens import EOS_ID, chat_tokenizer

WORDS = ("New", "and too", "Hello", "paragraph", "End", "and a new", "too")
FIELDS = {
    *("source", "index", "turn", "sample", "temperature", "top_p", "top_k", "seed", "thinking"),
    *("prompt", "messages", "prompt_ids", "completion_ids"),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", vocab_size=48, eos_token_id=EOS_ID)


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def user(*contents):
    return [{"role": "user", "content": content} for content in contents]


def words(*conversations, name="words"):
    given = conversations or tuple(user(word) for word in WORDS)
    return PromptSet(name, given, tuple(range(1, 1 + len(given))))


@pytest.fixture
def prepare(target, tokenizer, tmp_path):
    """Runs on a file of the test's folder."""

    def prepare(*sets, name="answers.jsonl", **options):
        fast = {"how": Sampling(temperatures=(0.0, 1.0), max_new_tokens=8), "batch_size": 3, "progress": False}
        return prepare_data(target, tokenizer, sets or [words()], tmp_path / name, **fast | options)

    return prepare


def test_a_line_holds_what_training_needs(prepare, tokenizer, target):
    done = prepare(how=Sampling(temperatures=(0.0, 0.7), top_p=0.9, top_k=20, max_new_tokens=8, samples_per_prompt=2))
    rows = read_jsonl(done.path)
    assert len(rows) == done.num_answers == 3 * len(WORDS), "one greedy answer and two samples of each"
    assert done.num_tokens == sum(len(row["completion_ids"]) for row in rows)
    assert all(set(row) == FIELDS for row in rows)
    assert {(r["temperature"], r["sample"], r["top_p"], r["top_k"], r["seed"] is None) for r in rows} == {
        (0.0, 0, None, None, True),
        (0.7, 0, 0.9, 20, False),
        (0.7, 1, 0.9, 20, False),
    }
    assert sorted({(row["source"], row["index"], row["prompt"]) for row in rows}) == [
        ("words", number, word) for number, word in enumerate(WORDS, start=1)
    ]
    for row in rows:
        assert row["messages"] == user(row["prompt"])
        assert row["prompt_ids"] == prompt_ids(tokenizer, row["messages"])
        assert EOS_ID not in row["completion_ids"][:-1] and 1 <= len(row["completion_ids"]) <= 8


def test_greedy_answers_are_those_of_generate_with_and_without_a_drafter(prepare, target):
    how = Sampling(temperatures=(0.0,), max_new_tokens=12)
    plain = read_jsonl(prepare(how=how).path)
    drafter = tiny_drafter(target).with_options(scheduler=FixedLength())
    assert read_jsonl(prepare(how=how, drafter=drafter, name="drafted.jsonl").path) == plain
    for row in plain:
        ids = target.generate(torch.tensor([row["prompt_ids"]]), max_new_tokens=12, do_sample=False)
        assert ids[0, len(row["prompt_ids"]) :].tolist()[: len(row["completion_ids"])] == row["completion_ids"]


class Stopped(Exception):
    pass


@pytest.mark.parametrize("drafted", [False, True])
def test_a_run_that_is_stopped_again_and_again_gives_the_same_file(prepare, target, tmp_path, monkeypatch, drafted):
    drafter = tiny_drafter(target).with_options(scheduler=FixedLength()) if drafted else None
    whole = prepare(drafter=drafter).path.read_bytes()
    generate, calls = target.generate, 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise Stopped
        return generate(*args, **kwargs)

    monkeypatch.setattr(target, "generate", failing)
    stops = 0
    while True:
        try:
            done = prepare(drafter=drafter, name="again.jsonl")
            break
        except Stopped:
            stops += 1
            with (tmp_path / "again.jsonl").open("ab") as file:
                file.write(b'{"prompt": "to')  # as if it had been stopped while it wrote
    assert stops >= 2 and done.path.read_bytes() == whole
    assert done.num_answers == 2 * len(WORDS)


def test_a_finished_file_is_left_as_it_is(prepare, target, monkeypatch):
    first = prepare()
    content = first.path.read_bytes()
    monkeypatch.setattr(target, "generate", None)
    assert prepare() == first and first.path.read_bytes() == content


@pytest.mark.parametrize(
    "options, said",
    [
        ({"how": Sampling(temperatures=(0.0, 1.0), max_new_tokens=9)}, "max_new_tokens: 8 then, 9 now"),
        ({"batch_size": 4}, "batch_size: 3 then, 4 now"),
        ({"thinking": False}, "thinking: null then, false now"),
        ({"system": "and"}, 'system: null then, "and" now'),
    ],
)
def test_other_parameters_are_refused_with_what_differs(prepare, options, said):
    prepare()
    with pytest.raises(ValueError, match=said):
        prepare(**options)


def test_other_prompts_are_refused(prepare):
    prepare()
    with pytest.raises(ValueError, match="prompts: "):
        prepare(words(*(user(word) for word in reversed(WORDS))))


def test_every_turn_is_answered_and_later_ones_see_the_answers_before(prepare, tokenizer):
    how = Sampling(temperatures=(0.0,), max_new_tokens=8)
    rows = read_jsonl(prepare(words(user("New", "too", "and"), user("Hello")), how=how).path)
    chat = sorted((row for row in rows if row["index"] == 1), key=lambda row: row["turn"])
    assert [row["turn"] for row in chat] == [0, 1, 2]
    assert [row["prompt"] for row in chat] == ["New", None, None]
    first = tokenizer.decode(chat[0]["completion_ids"], skip_special_tokens=True)
    assert chat[1]["messages"] == [*user("New"), {"role": "assistant", "content": first}, *user("too")]
    assert all(row["prompt_ids"] == prompt_ids(tokenizer, row["messages"]) for row in rows)


def test_thinking_and_a_system_message_are_rendered_and_recorded(prepare, tokenizer):
    own = [{"role": "system", "content": "Hello"}, *user("New")]
    given = words(user("too"), own)
    rows = read_jsonl(
        prepare(given, how=Sampling(temperatures=(0.0,), max_new_tokens=4), thinking=False, system="and").path
    )
    by_index = {row["index"]: row for row in rows}
    assert by_index[1]["messages"] == [{"role": "system", "content": "and"}, *user("too")]
    assert by_index[2]["messages"] == own
    assert by_index[1]["prompt"] is None and by_index[1]["thinking"] is False
    assert by_index[1]["prompt_ids"] == prompt_ids(tokenizer, by_index[1]["messages"], thinking=False)


def test_prompts_without_room_are_counted_and_left_out(prepare):
    how = Sampling(temperatures=(0.0,), max_new_tokens=8)
    done = prepare(words(user("a" * 600), user("New")), how=how)
    assert (done.num_skipped, done.num_answers) == (1, 1)
    with pytest.raises(ValueError, match="nothing to answer: 1 conversations"):
        prepare(words(user("a" * 600)), how=how, name="none.jsonl")


def test_samples_follow_the_seed_and_leave_the_global_state_alone(prepare):
    state = torch.get_rng_state()
    texts = [
        prepare(how=Sampling(max_new_tokens=8, seed=seed), name=f"{number}.jsonl").path.read_bytes()
        for number, seed in enumerate((1, 1, 2))
    ]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert len({batch_seed(seed, number) for seed in range(20) for number in range(20)}) == 400


@pytest.mark.parametrize(
    "options, said",
    [
        ({"temperatures": ()}, "one at least"),
        ({"temperatures": (-1.0,)}, "from 0"),
        ({"temperatures": (1.0, 1.0)}, "names one twice"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"samples_per_prompt": 0}, "at least 1"),
    ],
)
def test_values_out_of_range_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**options)


def test_an_own_repetition_penalty_of_the_target_is_a_parameter(prepare, target, tmp_path):
    before = copy.deepcopy(target.generation_config)
    prepare()
    target.generation_config.repetition_penalty = 1.3
    try:
        with pytest.raises(ValueError, match="generation_config: .*repetition_penalty"):
            prepare()
    finally:
        target.generation_config = before
    record = json.loads((tmp_path / "answers.jsonl.meta.json").read_text())
    assert record["parameters"]["temperatures"] == [0.0, 1.0] and record["parameters"]["drafted"] is False


def test_arguments_of_another_kind_are_refused(target, tokenizer, tmp_path):
    sets = [load_prompts_of("a")]
    with pytest.raises(TypeError, match="how must be a Sampling.*got dict"):
        prepare_data(target, tokenizer, sets, tmp_path / "x.jsonl", how={"temperatures": (0.0,)})
    with pytest.raises(TypeError, match="prompt_sets='prompts.jsonl' is a str; give a list of prompt sets"):
        prepare_data(target, tokenizer, "prompts.jsonl", tmp_path / "x.jsonl")
    with pytest.raises(TypeError, match=r"such as \(0.0,\)"):
        Sampling(temperatures=0.0)
    assert list(tmp_path.iterdir()) == []


def load_prompts_of(name):
    return PromptSet(name, ([{"role": "user", "content": "New"}],), (0,))

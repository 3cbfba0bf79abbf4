"""Evaluation of scripted drafters, whose figures are known beforehand."""

import copy
import json
import math

import pytest
import torch

from hf_dspark import CalibrationReport, FixedLength
from hf_dspark.evaluation import Evaluation, evaluate
from hf_dspark.evaluation_figures import SetFigures
from hf_dspark.evaluation_report import markdown_report, write_report
from hf_dspark.plots import _curves, plot_conditional_acceptance, plot_thresholds
from hf_dspark.prompt_sets import PromptSet
from tests.drafters import BigramPair, scripted, tiny_drafter
from tests.tiny import tiny_target
from tests.tokens import chat_tokenizer

VOCAB_SIZE = 48  # of the tokenizer
WORDS = ("New", "and too", "Hello", "paragraph", "End")


@pytest.fixture(scope="module")
def target():
    """Its next token depends on the newest one alone, so a script can know it."""
    return BigramPair(copy.deepcopy(tiny_target("qwen3", vocab_size=VOCAB_SIZE))).target


@pytest.fixture(scope="module")
def right_about(target):
    """A drafter of five drafts of which the first `count` are right."""
    next_ids = target(torch.arange(VOCAB_SIZE)[:, None]).logits[:, 0].argmax(-1).tolist()

    def make(count, **overrides):
        def script(row, prefix, num_drafts):
            token, drafts = prefix[-1], []
            for depth in range(num_drafts):
                token = next_ids[token]
                drafts.append(token if depth < count else (token + 1) % VOCAB_SIZE)
            return drafts

        return scripted(tiny_drafter(target, **overrides), script)

    return make


def prompts(name="words", texts=WORDS):
    return PromptSet(name, tuple([{"role": "user", "content": text}] for text in texts), tuple(range(len(texts))))


@pytest.fixture(scope="module")
def run(target):
    def run(drafter, *sets, **options):
        # Rounds of three tokens end exactly after 1 + 6 * 3.
        fast = {"max_new_tokens": 19, "batch_size": 4, "temperatures": (0.0,), "allow_random": True}
        return evaluate(target, drafter, sets or [prompts()], tokenizer=chat_tokenizer(), **fast | options)

    return run


def test_both_countings_and_all_positions_are_those_of_the_script(run, right_about):
    (found,) = run(right_about(2)).results
    assert (found.accepted_length, found.accepted_drafts, found.accepted_length_error) == (3, 2, 0)
    assert found.conditional_acceptance[:3] == (1, 1, 0) and all(map(math.isnan, found.conditional_acceptance[3:]))
    assert found.acceptance == (1, 1, 0, 0, 0)
    assert (found.num_prompts, found.num_answers, found.num_skipped) == (5, 5, 0)
    assert (found.num_tokens, found.num_rounds) == (5 * 19, 5 * 6)
    assert found.num_reached[:2] == (30, 30)
    assert found.verify_rate == pytest.approx(2 * 30 / (30 * found.verify_length))
    whole = [figures for figures in found.thresholds if figures.threshold == 0]
    assert whole[0].accepted_length == 3 and whole[0].verify_length == found.verify_length
    assert isinstance(found.reliability, CalibrationReport) and found.reliability.mode == "greedy"
    assert found.contexts[0].num_rounds == 30


def test_drafters_are_compared_on_the_same_text(run, right_about):
    found = run({"two": right_about(2), "none": right_about(0), "all": right_about(5)}, temperatures=(0.0,))
    assert [r.drafter for r in found.results] == ["two", "none", "all"]
    assert [r.accepted_length for r in found.results[:2]] == [3, 1]
    assert found.results[2].accepted_length > 5
    assert len({r.repetition_share for r in found.results}) == 1
    assert set(found.settings["drafters"]) == {"two", "none", "all"}


def test_every_turn_is_decoded_with_the_answers_before_it(run, right_about):
    turns = [{"role": "user", "content": text} for text in ("New", "too", "and")]
    (found,) = run(right_about(2), PromptSet("chat", (turns, turns[:1]), (0, 1))).results
    assert (found.num_prompts, found.num_answers) == (2, 4)


def test_sampling_has_a_mode_and_temperatures_of_its_own(run, right_about):
    drafter = right_about(2)
    drafter.config.confidence_temperatures = {"sampling": [2.0] * 5}
    try:
        greedy, sampled = run(drafter, temperatures=(0.0, 1.0)).results
    finally:
        drafter.config.confidence_temperatures = None
    assert greedy.reliability.temperatures == (1,) * 5 and sampled.reliability.temperatures == (2,) * 5
    assert sampled.reliability.mode == "sampling" and sampled.accepted_length < greedy.accepted_length


def test_a_drafter_without_confidences_has_no_thresholds_and_no_reliability(run, right_about, tmp_path):
    found = run(right_about(2, enable_confidence_head=False))
    (result,) = found.results
    assert result.thresholds == () and result.reliability is None and result.accepted_length == 3
    assert "threshold" not in markdown_report(found)
    names = [path.name for path in write_report(found, tmp_path, plot=True)]
    assert names == ["evaluation.json", "evaluation.md", "acceptance.png"]


def test_speed_is_measured_side_by_side(run, right_about):
    (found,) = run(right_about(2).with_options(scheduler=FixedLength()), speed_prompts=3).results
    speed = found.speed
    assert speed.num_prompts == 3 and speed.identical and speed.repeats == 3
    assert min(speed.plain_tokens_per_second, speed.tokens_per_second, speed.ratio) > 0


def test_an_evaluation_is_the_same_after_it_was_saved(run, right_about, tmp_path):
    two = right_about(2).with_options(scheduler=FixedLength())
    bare = right_about(1, enable_confidence_head=False).with_options(scheduler=FixedLength())
    found = run({"two": two, "bare": bare}, speed_prompts=1)
    found.save(tmp_path / "x.json")
    again = Evaluation.load(tmp_path / "x.json")
    assert repr(again.results) == repr(found.results)
    assert again.settings == json.loads(json.dumps(found.settings))
    assert "NaN" not in (tmp_path / "x.json").read_text()


@pytest.mark.parametrize("data", [{}, {"settings": {}, "results": [{}]}, {"settings": {}, "results": [3]}])
def test_what_is_no_evaluation_is_refused(data, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="no evaluation|not the figures of a set"):
        Evaluation.load(tmp_path / "x.json")


def test_fields_that_are_unknown_are_refused(run, right_about):
    values = run(right_about(2)).results[0].to_dict()
    with pytest.raises(ValueError, match="not the figures of a set"):
        SetFigures.from_dict(values | {"colour": "blue"})


def test_the_report_names_both_countings(run, right_about, tmp_path):
    sets = prompts(), prompts("others", WORDS[:2])
    found = run({"two": right_about(2), "n|o/ne": right_about(0)}, *sets)
    json_path, markdown_path = write_report(found, tmp_path / "new")
    text = markdown_path.read_text(encoding="utf-8")
    with_own, without = text.split("## Accepted drafts a round")
    assert "| two | 0 | 3.00 ± 0.00 | 3.00 ± 0.00 | 3.00 |" in with_own
    assert "| two | 0 | 2.00 | 2.00 | 2.00 |" in without
    assert "| n/o/ne | 0 | 1.00 ± 0.00 |" in with_own
    for line in (line for line in text.split("\n") if line.startswith("|")):
        assert line.endswith("|")
    assert "≥ 8k tokens" in text and "repetition" in text
    assert len(Evaluation.load(json_path).results) == 4


def test_pictures_compare_drafters(run, right_about, tmp_path):
    found = run({"two": right_about(2, block_size=2), "n|o/ne": right_about(0, block_size=2)}, max_new_tokens=7)
    written = write_report(found, tmp_path / "new", plot=True)[2:]
    assert [path.name for path in written] == [
        *("acceptance.png", "thresholds.png", "reliability.two.png", "reliability.n_o_ne.png")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


@pytest.mark.parametrize("plot", [plot_conditional_acceptance, plot_thresholds])
def test_a_picture_of_nothing_is_refused(plot, tmp_path):
    with pytest.raises(ValueError, match="no results"):
        plot([], tmp_path / "none.png")
    assert list(tmp_path.iterdir()) == []


def test_finished_sets_are_told_before_the_next_begins(run, right_about):
    told = []

    def stop(so_far):
        told.append([r.dataset for r in so_far.results])
        if len(told) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(right_about(2), prompts("a"), prompts("b"), prompts("c"), on_result=stop)
    assert told == [["a"], ["a", "b"]]


def test_random_prompts_are_refused_before_anything_is_decoded(run, right_about, monkeypatch):
    monkeypatch.setattr("hf_dspark.evaluation.WholeBlocks", None)
    with pytest.raises(ValueError, match="look like random tokens"):
        # To a target with random weights every text is as good as random.
        run(right_about(2), prompts(texts=["paragraph and paragraph too"]), allow_random=False)


def test_text_past_the_length_of_training_draws_one_warning(run, right_about, monkeypatch):
    said = set()
    monkeypatch.setattr("hf_dspark.evaluation.logger.warning_once", said.add)
    drafter = right_about(2)
    drafter.config = copy.deepcopy(drafter.config)
    drafter.config.training_length = 512
    run(drafter)
    assert said == set()
    drafter.config.training_length = 20
    run({"mine": drafter}, prompts(), prompts("b"))
    (warning,) = said
    assert warning.startswith("mine: texts of up to ") and "past the drafter's training_length of 20" in warning


def test_prompts_without_room_for_an_answer_are_counted(run, right_about):
    (found,) = run(right_about(2), prompts(texts=["New", "a" * 500])).results
    assert (found.num_prompts, found.num_skipped, found.num_answers) == (2, 1, 1)
    with pytest.raises(ValueError, match="every prompt is longer than the 493 tokens"):
        run(right_about(2), prompts(texts=["a" * 500]))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"temperatures": ()}, "nothing to evaluate"),
        ({"temperatures": (-1.0,)}, "must be 0"),
        ({"thresholds": (1.5,)}, "no probability"),
        ({"max_new_tokens": 1}, "at least 2"),
        ({"batch_size": 0}, "at least 1"),
    ],
)
def test_options_out_of_range_are_refused(run, right_about, options, said):
    with pytest.raises(ValueError, match=said):
        run(right_about(2), **options)


def test_sets_of_one_name_are_refused(run, right_about):
    with pytest.raises(ValueError, match="must each be there once"):
        run(right_about(2), prompts(), prompts())


def test_an_empty_set_is_refused(run, right_about):
    with pytest.raises(ValueError, match="'none' is empty"):
        run(right_about(2), PromptSet("none", (), ()))


@pytest.mark.parametrize(
    "given, said",
    [
        ({"target": None}, "target must be a transformers model"),
        ({"drafter": "folder"}, "drafter 'drafter' must be a drafter of hf_dspark"),
        ({"tokenizer": None}, "AutoTokenizer"),
        ({"prompt_sets": "prompts.jsonl"}, r"give a list of prompt sets: \[load_prompts"),
        ({"prompt_sets": ["prompts.jsonl"]}, r"has 'prompts.jsonl', a str; give a list of prompt sets"),
        ({"prompt_sets": prompts("a")}, "is a PromptSet; give a list"),
        ({"temperatures": 0.0}, r"such as \(0.0,\)"),
        ({"thresholds": ["0.5"]}, "must be numbers in a list"),
    ],
)
def test_arguments_of_another_kind_are_refused(target, right_about, given, said):
    usual = {"target": target, "drafter": right_about(2), "prompt_sets": [prompts("a")], "tokenizer": chat_tokenizer()}
    with pytest.raises(TypeError, match=said):
        evaluate(**usual | given)


def test_curves_that_coincide_show_beside_and_below_each_other(run, right_about):
    results = run({"one": right_about(2), "two": right_about(2)}, prompts("a"), temperatures=(0.0,)).results
    (first, left, _), (second, right, _) = _curves(results, "a", 0.0)
    assert left == -right != 0
    assert first["marker"] != second["marker"] and first["linewidth"] > second["linewidth"]

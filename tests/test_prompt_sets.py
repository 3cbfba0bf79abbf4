"""Prompts from files and from the Hub: rows keep their numbers, what is broken is named, answers are left out."""

import json
import sys
from types import SimpleNamespace

import pytest

from hf_dspark.prompt_sets import HUB_SETS, PromptSet, conversation_of, load_prompts, read_jsonl


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(prompts: PromptSet):
    return [[message["content"] for message in conversation] for conversation in prompts.conversations]


@pytest.fixture
def numbered(tmp_path):
    return write(tmp_path / "rows.jsonl", [{"turns": [f"row {number}", "more"]} for number in range(12)])


def user(*contents):
    return [{"role": "user", "content": content} for content in contents]


def test_a_line_ends_at_a_newline_only(tmp_path):
    rows = [{"prompt": "one\u2028two\u2029three\x85four"}, {"prompt": "five"}]
    path = write(tmp_path / "x.jsonl", rows)
    assert read_jsonl(path) == rows
    path.write_text(path.read_text(encoding="utf-8").removesuffix("\n"), encoding="utf-8")
    assert read_jsonl(path) == rows, "the last line needs no end"


@pytest.mark.parametrize("line", ["not json", "[1]", "3", "", '{"a": 1'])
def test_a_broken_line_is_named_with_its_file_and_number(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n' + line + '\n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 3: expected a JSON object"):
        read_jsonl(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"  \n"])
def test_an_empty_file_is_refused(tmp_path, content):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.jsonl is empty"):
        read_jsonl(tmp_path / "x.jsonl")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(ValueError, match="no UTF-8"):
        read_jsonl(tmp_path / "x.jsonl")


def test_a_row_is_turns_a_prompt_or_messages_without_their_answers():
    assert conversation_of({"turns": ["a", "b"]}) == user("a", "b")
    assert conversation_of({"prompt": "a", "completion_ids": [1]}) == user("a")
    chat = [("system", "s"), ("user", "a"), ("assistant", "x"), ("user", "b"), ("assistant", "y")]
    messages = [{"role": role, "content": content, "extra": 1} for role, content in chat]
    assert conversation_of({"messages": messages}) == [{"role": "system", "content": "s"}, *user("a", "b")]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"turns": []},
        {"turns": "text"},
        {"turns": [3]},
        {"turns": ["", "b"]},
        {"prompt": None},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    ],
)
def test_a_row_without_a_prompt_is_refused(row, tmp_path):
    path = write(tmp_path / "x.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: expected a"):
        load_prompts(path)


def test_rows_are_chosen_by_number_and_keep_it(numbered):
    held_out, rest = load_prompts(numbered, every=5), load_prompts(numbered, hold_out=5)
    assert held_out.name == "rows" and held_out.indices == (0, 5, 10)
    assert sorted(held_out.indices + rest.indices) == list(range(12))
    assert texts(load_prompts(numbered, every=3, offset=1, limit=2, turns=1)) == [["row 1"], ["row 4"]]
    assert len(load_prompts(numbered)) == 12 and texts(load_prompts(numbered))[11] == ["row 11", "more"]


def test_a_limit_counts_what_is_left_after_long_prompts(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"turns": ["x" * length, "y" * 50]} for length in (5, 30, 6, 7)])
    assert load_prompts(path, turns=1, max_characters=20, limit=2).indices == (0, 2)
    with pytest.raises(ValueError, match="no prompts were given: of the 4 rows"):
        load_prompts(path, max_characters=20)


def test_a_set_without_rows_is_refused(numbered):
    with pytest.raises(ValueError, match="no prompts were given: of the 12 rows"):
        load_prompts(numbered, offset=12)


@pytest.mark.parametrize("option", [{"every": 0}, {"offset": -1}, {"limit": 0}, {"turns": 0}, {"hold_out": 1}])
def test_options_out_of_range_are_refused(numbered, option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be at least"):
        load_prompts(numbered, **option)


def test_an_unknown_name_is_answered_with_those_that_are_known():
    with pytest.raises(ValueError, match="'gsm9k' is no file, and no set that is known by name: gsm8k, math500"):
        load_prompts("gsm9k")
    with pytest.raises(FileNotFoundError):
        load_prompts("no/such.jsonl")


ROWS = {
    "gsm8k": {"question": "Q", "answer": "A"},
    "math500": {"problem": "Q", "answer": "A"},
    "aime25": {"problem": "Q", "answer": "A"},
    "mbpp": {"prompt": "Q", "code": "A"},
    "humaneval": {"prompt": "Q", "canonical_solution": "A"},
    "livecodebench": {"question_content": "Q", "starter_code": ""},
    "mt-bench": {"prompt": ["Q", "and then?"], "category": "writing"},
    "alpaca": {"instruction": "Q", "input": "about this", "output": "A"},
    "arena-hard": {"prompt": "Q", "category": "hard_prompt"},
}


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package `datasets`, whose every data set holds `hub.rows`; its calls are kept."""
    hub = SimpleNamespace(rows=[], calls=[], error=None)

    def load_dataset(path, name=None, *, split, data_files=None):
        hub.calls.append((path, name, split, data_files))
        if hub.error:
            raise hub.error
        return hub.rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return hub


@pytest.mark.parametrize("name", HUB_SETS)
def test_every_named_set_makes_prompts_of_its_fields(hub, name):
    hub.rows = [ROWS[name]] * 3
    prompts = load_prompts(name, every=2)
    assert prompts.name == name and prompts.indices == (0, 2)
    (path, config, split, files), source = hub.calls[0], HUB_SETS[name]
    assert (path, config, split, files) == (source.path, source.config, source.split, source.data_files)
    first = prompts.conversations[0][0]["content"]
    assert "Q" in first and "A" not in first.replace("And", "").replace("Answer", "")
    assert len(prompts.conversations[0]) == (2 if name == "mt-bench" else 1)


def test_parts_of_a_prompt_are_joined_where_they_are_there(hub):
    hub.rows = [ROWS["alpaca"], {"instruction": "Q", "input": "", "output": "A"}]
    assert texts(load_prompts("alpaca")) == [["Q\n\nabout this"], ["Q"]]


def test_a_field_that_has_moved_is_named_with_those_that_are_there(hub):
    hub.rows = [{"text": "Q", "label": 1}]
    with pytest.raises(ValueError, match=r"no field 'question'; there are \['label', 'text'\]"):
        load_prompts("gsm8k")


def test_any_data_set_with_chats_is_read(hub):
    hub.rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]
    prompts = load_prompts("me/chats", config="en", split="train_sft")
    assert hub.calls == [("me/chats", "en", "train_sft", None)]
    assert prompts.conversations == (user("hi"),)
    load_prompts("me/chats")
    assert hub.calls[1] == ("me/chats", None, "train", None)


def test_without_the_package_or_the_network_the_way_out_is_told(hub, monkeypatch):
    hub.error = ConnectionError("no route")
    with pytest.raises(ConnectionError, match="gsm8k could not be loaded from the Hub.*no route.*give a JSONL file"):
        load_prompts("gsm8k")
    hub.error = RuntimeError("Dataset scripts are no longer supported")
    with pytest.raises(ValueError, match="does not load.*scripts.*JSONL file"):
        load_prompts("gsm8k")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-dspark\[data\]', or give a JSONL file"):
        load_prompts("gsm8k")

"""Rows become examples: what the target wrote is learnt, and nothing else."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dspark.training.data import chat_example, example_of, load_examples

WORDS = "hi hello there bye see you <s> </s> user assistant system : think".split()
TEMPLATE = (
    "{% for message in messages %}{{ '<s> ' + message['role'] + ' : ' + message['content'] + ' </s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant : ' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<s> ' + message['role'] + ' : ' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' </s>' }}{% endgeneration %}{% else %}{{ message['content'] + ' </s>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s> assistant : ' }}{% endif %}"
)
THINKS = (  # thoughts of earlier turns are left out
    "{% for message in messages %}{{ '<s> ' + message['role'] + ' : ' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ 'think ' }}{% endif %}"
    "{{ message['content'] + ' </s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<s> assistant : ' }}{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"},
]


def tokenizer_with(template):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="?")
    tokenizer.chat_template = template
    return tokenizer


def learnt(tokenizer, example):
    return tokenizer.decode([t for t, keep in zip(example.input_ids, example.loss_mask, strict=True) if keep])


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["difference", "generation"])
def test_every_answer_of_a_chat_is_learnt_with_its_end(template):
    tokenizer = tokenizer_with(template)
    example = chat_example(CHAT, tokenizer)
    whole = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert list(example.input_ids) == whole
    assert learnt(tokenizer, example) == "hello there </s> see you </s>"


def test_of_a_template_that_shortens_earlier_answers_only_the_last_is_learnt():
    tokenizer = tokenizer_with(THINKS)
    assert learnt(tokenizer, chat_example(CHAT, tokenizer)) == "think see you </s>"


def test_completion_ids_follow_the_rendered_prompt():
    tokenizer = tokenizer_with(TEMPLATE)
    asked = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    for row in ({"prompt": "hi"}, {"messages": CHAT[:1]}, {"prompt_ids": asked, "prompt": None}):
        example = example_of({**row, "completion_ids": [1, 2, 7]}, tokenizer)
        assert example.input_ids == (*asked, 1, 2, 7)
        assert example.loss_mask == (0,) * len(asked) + (1, 1, 1)


def test_files_are_split_by_the_number_of_the_row_in_its_source(tmp_path):
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": "hi \u2028 there", "completion_ids": [n + 1], "index": 3 + n} for n in range(4)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    split = load_examples([path], tokenizer_with(TEMPLATE), hold_out=5)
    assert [e.input_ids[-1] for e in split.train] == [1, 2, 4]
    assert [e.input_ids[-1] for e in split.evaluation] == [3]
    assert len(load_examples([path], tokenizer_with(TEMPLATE), limit=2).train) == 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi"},
        {"messages": CHAT[:1]},
        {"completion_ids": [1]},
        {"prompt": "hi", "completion_ids": ["a"]},
        {"prompt": "hi", "completion_ids": [-1]},
        {"messages": []},
    ],
    ids=str,
)
def test_a_row_without_an_answer_is_named_by_file_and_line(tmp_path, row):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"prompt": "hi", "completion_ids": [1]}) + "\n" + json.dumps(row))
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 2: "):
        load_examples([path], tokenizer_with(TEMPLATE))


def test_chats_need_a_template():
    with pytest.raises(ValueError, match="no chat template"):
        chat_example(CHAT, tokenizer_with(None))

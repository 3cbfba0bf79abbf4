"""Conversations are answered turn by turn, with the target's own answers in between."""

import pytest

from hf_dspark.chats import answer_turns, prompt_ids
from tests.tokens import byte_tokenizer, chat_tokenizer


def user(*contents):
    return [{"role": "user", "content": content} for content in contents]


def encoded(tokenizer, text):
    return tokenizer(text)["input_ids"]


def test_a_template_says_what_a_prompt_is_and_without_one_texts_are_joined():
    chat, plain = chat_tokenizer(), byte_tokenizer()
    assert prompt_ids(chat, user("New", "too")) == encoded(chat, "<bos>New<eos><bos>too<eos>:")
    assert prompt_ids(plain, user("New", "too")) == encoded(plain, "New\n\ntoo")


def test_thinking_reaches_the_template_only_when_it_is_asked_for():
    tokenizer = chat_tokenizer()
    default = prompt_ids(tokenizer, user("New"))
    assert prompt_ids(tokenizer, user("New"), thinking=True) == default
    assert prompt_ids(tokenizer, user("New"), thinking=False) == default + encoded(tokenizer, ",")


def test_thinking_that_a_template_does_not_know_draws_a_warning(monkeypatch):
    said = []
    monkeypatch.setattr("hf_dspark.chats.logger.warning_once", said.append)
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    prompt_ids(tokenizer, user("New"))
    assert said == []
    prompt_ids(tokenizer, user("New"), thinking=False)
    assert "`thinking` is ignored" in said[0]


@pytest.fixture
def scribe():
    """Answers `End` and how often it was asked; keeps the prompts."""
    tokenizer, asked = chat_tokenizer(), []

    def respond(prompts):
        asked.append([tokenizer.decode(ids) for ids in prompts])
        return [encoded(tokenizer, "End" + "d" * len(asked) + "<eos>") for _ in prompts]

    return tokenizer, respond, asked


def test_each_turn_sees_the_answers_before_it(scribe):
    tokenizer, respond, asked = scribe
    conversations = [user("New", "too"), [{"role": "system", "content": "and"}, *user("Hello")]]
    answers = answer_turns(tokenizer, conversations, respond)
    assert asked == [
        ["<bos>New<eos>:", "<bos>and<eos><bos>Hello<eos>:"],
        ["<bos>New<eos><bos>Endd<eos><bos>too<eos>:"],
    ]
    assert [(a.conversation, a.turn) for a in answers] == [(0, 0), (0, 1), (1, 0)]
    assert [m["role"] for m in answers[1].messages] == ["user", "assistant", "user"]
    assert all(a.prompt_ids == prompt_ids(tokenizer, a.messages) for a in answers)
    assert tokenizer.decode(answers[1].new_ids) == "Enddd<eos>"


def test_a_conversation_ends_before_a_prompt_that_is_too_long(scribe):
    tokenizer, respond, asked = scribe
    answers = answer_turns(
        tokenizer, [user("New", "too", "and"), user("a" * 40, "too")], respond, max_prompt_tokens=18
    )
    assert [(a.conversation, a.turn) for a in answers] == [(0, 0), (0, 1)]
    assert len(asked) == 2
    assert answer_turns(tokenizer, [user("a" * 40)], respond, max_prompt_tokens=18) == []

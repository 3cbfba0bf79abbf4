"""`transformers serve --trust-remote-code` on a target's folder with a `custom_generate` in it: live, and drafting."""

import contextlib
import json
import socket
import time
import urllib.request

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_dspark.custom_generate import export_generate
from hf_dspark.decoding import Decoder
from tests.drafters import tiny_drafter
from tests.tiny import PAD_ID, tiny_target

for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, reason="needs `pip install transformers[serving]`")

CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    target = tiny_target("qwen3")
    target.save_pretrained(tmp_path / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(target.config.vocab_size)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"w{PAD_ID}", chat_template=CHAT)
    tokenizer.save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "saved")
    return export_generate(tmp_path / "target", drafter=tmp_path / "saved", embed=True)


@contextlib.contextmanager
def served(folder, *, trust_remote_code):
    """URL of a live server of the model in a folder."""
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"host": "127.0.0.1", "port": port, "device": "cpu", "non_blocking": True}
    serve = Serve(force_model=str(folder), trust_remote_code=trust_remote_code, **place)
    try:
        for _ in range(100):
            if serve.server.started:
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.kill_server()


def answer(url, folder, *, stream):
    body = {"model": str(folder), "messages": [{"role": "user", "content": "w5 w6 w7"}], "max_tokens": 12}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body | {"temperature": 0.0, "stream": stream}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read().decode()
    if not stream:
        return json.loads(text)["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def test_a_served_target_drafts_where_its_code_is_trusted_and_answers_as_without(folder, monkeypatch):
    runs, original = [], Decoder.run

    def watched(self):
        runs.append(self)  # before it runs: a stream is read to its end before `run` returns
        return original(self)

    monkeypatch.setattr(Decoder, "run", watched)
    answers = {}
    for trusted in (False, True):
        with served(folder, trust_remote_code=trusted) as url:
            answers[trusted] = [answer(url, folder, stream=stream) for stream in (False, True)]
            assert len(runs) == 2 * trusted
    assert answers[True] == answers[False]
    assert len(answers[True][0].split()) >= 12

"""Publishing: one commit or nothing, with the missing right named; the folder holds the drafter and its card alone."""

import base64
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from huggingface_hub import HfApi, constants
from safetensors import safe_open
from transformers import AutoConfig, AutoModel

from hf_dspark import DSparkDrafter
from hf_dspark.hub import PublishError, publish, publishable_folder
from tests.drafters import AUTOREGRESSIVE, generate, left_padded, tiny_drafter
from tests.tiny import tiny_target

COMMIT = "a" * 40


class StubHub(http.server.BaseHTTPRequestHandler):
    """The Hub's HTTP API, as far as publishing and loading small files needs it; notes what it was asked."""

    def answer(self, status, body=None, code=None, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        if code:
            headers["X-Error-Code"] = code
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args):
        pass

    def url(self):
        return f"http://{self.headers['Host']}"

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server
        hub.gets.append(self.path)
        if "/resolve/" in self.path:
            name, _, place = self.path.strip("/").partition("/resolve/")
            content = hub.repos.get(name, {}).get(place.partition("/")[2])
            if content is None:
                return self.answer(404, code="EntryNotFound" if name in hub.repos else "RepoNotFound")
            return self.answer(200, content, X_Repo_Commit=COMMIT, ETag=f'"{place.replace("/", "-")}"')
        if self.headers.get("Authorization") not in ("Bearer hf_write", "Bearer hf_read"):
            return self.answer(401, {"error": "Invalid credentials"})
        if self.path.startswith("/api/whoami"):
            role = self.headers["Authorization"].removeprefix("Bearer hf_")
            access = {"accessToken": {"role": role, "displayName": "laptop"}}
            return self.answer(200, {"name": "me", "type": "user", "orgs": [], "auth": access})
        name = "/".join(self.path.split("?")[0].split("/")[3:5])
        if name in hub.repos:
            return self.answer(200, {"id": name, "sha": "0" * 40, "siblings": []})
        return self.answer(404, {"error": "Repository not found"}, code="RepoNotFound")

    def do_POST(self):
        hub, body = self.server, self.body()
        hub.posts.append(self.path)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if not name.startswith("me/"):
                return self.answer(403, {"error": "You don't have the rights to create a model under this namespace"})
            hub.repos[name] = {}
            return self.answer(200, {"url": f"{self.url()}/{name}", "name": name, "id": "1"})
        name = "/".join(self.path.split("/")[3:5])
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if "/commit/" in self.path:
            if hub.broken:
                return self.answer(400, {"error": "Bad request"})  # the client tries again at what is the Hub's fault
            lines = [json.loads(line) for line in body.decode().splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            hub.repos[name] = {file["path"]: base64.b64decode(file["content"]) for file in files}
            url = f"{self.url()}/{name}/commit/{COMMIT}"
            return self.answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})
        return self.answer(200)

    def do_DELETE(self):
        asked = json.loads(self.body())
        self.server.repos.pop(f"{asked.get('organization') or 'me'}/{asked['name']}", None)
        self.answer(200)


@pytest.fixture
def hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StubHub)
    server.repos, server.posts, server.gets, server.broken = {}, [], [], False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.api = HfApi(endpoint=f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("hf_dspark.hub.HfApi", lambda **kwargs: server.api)
    monkeypatch.setattr("hf_dspark.hub.get_token", lambda: None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    tiny_drafter(tiny_target("qwen3")).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_drafter_is_published_in_one_commit_with_its_card(hub):
    url = tiny_drafter(tiny_target("qwen3")).push_to_hub("me/drafter", token="hf_write", private=True)
    assert "/me/drafter/commit/" in url
    assert hub.repos["me/drafter"].keys() == {"README.md", "config.json", "model.safetensors"}
    assert sum("/commit/" in path for path in hub.posts) == 1


def test_a_name_alone_goes_to_the_owner_of_the_token(hub, folder):
    publish(folder, "drafter", token="hf_write")
    assert "me/drafter" in hub.repos


@pytest.mark.parametrize(
    ("token", "repo_id", "words"),
    [
        (None, "me/drafter", "no token was found"),
        ("hf_read", "me/drafter", "'laptop' may only read"),
        ("hf_wrong", "me/drafter", "the token is not valid"),
        ("hf_write", "others/drafter", "no right to write to others/drafter"),
    ],
)
def test_a_missing_right_is_named_and_nothing_is_published(hub, folder, token, repo_id, words):
    with pytest.raises(PublishError, match=words) as error:
        publish(folder, repo_id, token=token)
    assert "othing was published" in str(error.value) and "hf auth login" in str(error.value)
    assert hub.repos == {}


def test_a_commit_that_fails_takes_back_the_repository_that_was_made_for_it(hub, folder):
    hub.broken = True
    with pytest.raises(PublishError, match="nothing was published"):
        publish(folder, "me/new", token="hf_write")
    assert hub.repos == {}
    hub.repos["me/old"] = {"README.md": b"old"}
    with pytest.raises(PublishError):
        publish(folder, "me/old", token="hf_write")
    assert hub.repos == {"me/old": {"README.md": b"old"}}


def test_offline_and_unreachable_are_told_apart_from_rights(hub, folder, monkeypatch):
    with pytest.raises(PublishError, match="cannot be reached"):
        publish(folder, "me/drafter", token="hf_write", api=HfApi(endpoint="http://127.0.0.1:9"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PublishError, match="HF_HUB_OFFLINE"):
        publish(folder, "me/drafter", token="hf_write")
    assert hub.posts == []


def test_only_the_drafter_and_its_card_are_copied(folder, tmp_path):
    (folder / "optimizer.pt").write_text("large")
    (folder / "checkpoint-7").mkdir()
    (folder / "dspark_sts_greedy.json").write_text("{}")
    written = publishable_folder(folder, tmp_path / "out", "# Card\n")
    assert {path.name for path in written.iterdir()} == {
        *("README.md", "config.json", "model.safetensors", "dspark_sts_greedy.json")
    }
    with pytest.raises(ValueError, match="holds something"):
        publishable_folder(folder, written, "# Card\n")
    with pytest.raises(ValueError, match="holds no drafter"):
        publishable_folder(tmp_path, tmp_path / "other", "# Card\n")


def test_after_decoding_only_the_drafters_tensors_are_saved_and_they_draft_the_same(tmp_path):
    target, inputs = tiny_target("qwen3"), left_padded([3, 5])
    drafter = tiny_drafter(target)
    before = generate(target, inputs, drafter, max_new_tokens=12)
    drafter.save_pretrained(tmp_path, model_card="# Mine\n")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == set(drafter.state_dict()) and not any("embed_tokens" in name for name in names)
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
    loaded = generate(target, inputs, DSparkDrafter.from_pretrained(tmp_path), max_new_tokens=12)
    assert [r.draft_ids for r in loaded.rounds] == [r.draft_ids for r in before.rounds]


@pytest.mark.parametrize("kind", ["parallel", "autoregressive"])
def test_remote_code_loads_through_the_auto_classes_and_drafts_the_same(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    target, inputs = tiny_target("qwen3"), left_padded([4])
    drafter = tiny_drafter(target, **(AUTOREGRESSIVE if kind == "autoregressive" else {}))
    drafter.save_pretrained(tmp_path / "saved")
    folder = publishable_folder(tmp_path / "saved", tmp_path / "out", "# Card\n", remote_code=True)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    loaded, info = AutoModel.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert isinstance(loaded, type(drafter)) and config.target_layer_ids == drafter.config.target_layer_ids
    expected = generate(target, inputs, drafter, max_new_tokens=8)
    output = generate(target, inputs, loaded, max_new_tokens=8)
    assert torch.equal(output.sequences, expected.sequences)
    assert [r.draft_ids for r in output.rounds] == [r.draft_ids for r in expected.rounds]


NEWCOMER = """
import sys, urllib.request
import huggingface_hub.constants
from transformers import AutoModel

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_dspark":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def load():
    return AutoModel.from_pretrained("me/drafter", trust_remote_code=True)

sys.meta_path.insert(0, Missing())
try:
    load()
except ImportError as error:
    print("refused:", error)
del sys.meta_path[0]
print("online:", type(load()).__mro__[1].__module__)
urllib.request.urlopen(huggingface_hub.constants.ENDPOINT + "/me/drafter/resolve/main/config.json").read()
huggingface_hub.constants.HF_HUB_OFFLINE = True
print("offline:", sum(tensor.double().sum().item() for tensor in load().state_dict().values()))
"""


def test_a_fresh_process_says_what_to_install_then_loads_and_loads_again_offline(hub, folder, tmp_path):
    """Published to the stub, and loaded from it with `trust_remote_code`, first without the package."""
    publish(publishable_folder(folder, tmp_path / "out", "# Card\n", remote_code=True), "me/drafter", token="hf_write")
    hub.gets.clear()
    own = {"HF_ENDPOINT": hub.api.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    child = subprocess.run(
        [sys.executable, "-c", NEWCOMER], env=os.environ | own, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    said = dict(line.split(": ", 1) for line in child.stdout.splitlines())
    assert said["refused"] == "this drafter needs the package hf_dspark: pip install hf-dspark"
    assert said["online"] == "hf_dspark.modeling_dspark"
    sums = (tensor.double().sum().item() for tensor in DSparkDrafter.from_pretrained(folder).state_dict().values())
    assert float(said["offline"]) == pytest.approx(sum(sums), abs=1e-9)
    assert "/me/drafter/resolve/main/model.safetensors" in hub.gets
    assert hub.gets[-1] == "/me/drafter/resolve/main/config.json", "the script's own request: none came after it"

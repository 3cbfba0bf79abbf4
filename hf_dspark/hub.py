"""Drafters on the Hub: a folder that is complete, checked rights, one commit.

Contract: `publishable_folder` writes what a repository holds: the drafter's config and tensors, its card, its tables,
and on request code for `trust_remote_code`. `publish` sends such a folder, all of it or nothing: what would be refused
(no network, no token, no right) is found out and named before anything is sent, files go in one commit, and a
repository that was made for a commit that failed is taken back.
"""

import os
import shutil
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token

from .json_files import read_object, write_object
from .model_card import PACKAGE

FILES = ("model*.safetensors", "*.safetensors.index.json", "dspark_*.json", "generation_config.json")
REMOTE_MODULE = "modeling_hf_dspark"
NEEDED = "a token with the right to write to it (https://huggingface.co/settings/tokens; then `hf auth login`)"

_REMOTE_CODE = '''"""Lets Auto classes load this drafter with `trust_remote_code=True`; the code is hf_dspark's."""

try:
    import hf_dspark
except ImportError as error:
    raise ImportError("this drafter needs the package hf_dspark: pip install {package}") from error


class {config}(hf_dspark.{config}):
    pass


class {drafter}(hf_dspark.{drafter}):
    config_class = {config}
'''


class PublishError(RuntimeError):
    """Nothing was published; the message says which right or connection is missing."""


def publishable_folder(
    source: str | os.PathLike, destination: str | os.PathLike, card: str, *, remote_code: bool = False
) -> Path:
    """
    Copies a drafter's files, and nothing else that lies beside them, and writes its card.

    Args:
        source (`str` or `os.PathLike`): A folder that `save_pretrained` wrote.
        destination (`str` or `os.PathLike`): An empty folder, or one to be made.
        card (`str`): The README.md, see [`model_card`].
        remote_code (`bool`, *optional*, defaults to `False`): Write code and `auto_map`, so that `AutoModel` loads it
            where hf_dspark is not imported (or says what to install).

    Raises:
        ValueError: The source is no hf_dspark folder, or there is something in the destination.
    """
    source, destination = Path(source), Path(destination)
    config = checked_config(source)
    if destination.exists() and any(destination.iterdir()):
        raise ValueError(f"{destination} holds something; name a folder that is empty or not there")
    destination.mkdir(parents=True, exist_ok=True)
    for pattern in FILES:
        for path in sorted(source.glob(pattern)):
            shutil.copyfile(path, destination / path.name)
    if remote_code:
        config |= {"auto_map": write_remote_code(destination, config)}
    write_object(destination / "config.json", config, indent=2)
    (destination / "README.md").write_text(card, encoding="utf-8")
    return destination


def checked_config(folder: Path) -> dict:
    """The config of an hf_dspark folder; `ValueError` if it is none."""
    if not (folder / "config.json").is_file() or not any(folder.glob("model*.safetensors")):
        raise ValueError(f"{folder} holds no drafter: config.json and model.safetensors are needed")
    config = read_object(folder / "config.json")
    if not str(config.get("model_type")).startswith("dspark"):
        raise ValueError(
            f"{folder} is in another project's layout (model_type {config.get('model_type')!r}); write ours with "
            f"`hf-dspark convert {folder} OUT --to native`, and publish that"
        )
    return config


def write_remote_code(folder: Path, config: dict) -> dict[str, str]:
    """Writes the module for `trust_remote_code`; returns the `auto_map` that names it."""
    (name,) = config["architectures"]
    config_name = name.removesuffix("Drafter") + "Config"
    text = _REMOTE_CODE.format(package=PACKAGE, config=config_name, drafter=name)
    (folder / f"{REMOTE_MODULE}.py").write_text(text, encoding="utf-8")
    return {"AutoConfig": f"{REMOTE_MODULE}.{config_name}", "AutoModel": f"{REMOTE_MODULE}.{name}"}


def publish(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload drafter",
    commit_description: str | None = None,
    api: HfApi | None = None,
) -> str:
    """
    Sends a folder to a repository of models in one commit.

    Args:
        folder (`str` or `os.PathLike`): Everything in it is sent.
        repo_id (`str`): `owner/name`, or `name` for the token's owner. Made if it does not exist.
        private (`bool`, *optional*): For a repository that is made.
        token (`str` or `bool`, *optional*): In place of the one that `hf auth login` stored.
        revision (`str`, *optional*), create_pr (`bool`), commit_message, commit_description (`str`): Of the commit.
        api (`HfApi`, *optional*): Client, for another endpoint.

    Returns:
        `str`: URL of the commit.

    Raises:
        PublishError: Offline, no token, or no right; nothing was published.
    """
    api = api or HfApi(library_name="hf_dspark")
    key = (token if isinstance(token, str) else None) or (api.token if isinstance(api.token, str) else get_token())
    repo_id = writable(api, repo_id, key)
    made = False
    try:
        if made := not api.repo_exists(repo_id, token=key):
            api.create_repo(repo_id, private=private, token=key)
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, token=key, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=Path(folder),
            token=key,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
            commit_description=commit_description,
        )
    except BaseException as error:  # whatever it was, an interrupt too
        left = _taken_back(api, repo_id, key) if made else ""
        if not isinstance(error, Exception):
            raise
        raise PublishError(f"{_reason(error, repo_id)}; nothing was published{left}") from error
    return commit.pr_url if create_pr and commit.pr_url else commit.commit_url


def writable(api: HfApi, repo_id: str, token: str | None) -> str:
    """`repo_id` with its owner, if the token may write there as far as can be told beforehand; else `PublishError`."""
    if constants.HF_HUB_OFFLINE:
        raise PublishError("HF_HUB_OFFLINE is set: publishing needs the Hub; unset it. Nothing was published")
    if not token:
        raise PublishError(f"no token was found; publishing {repo_id} needs {NEEDED}. Nothing was published")
    try:
        account = api.whoami(token=token)
    except Exception as error:  # transport errors have no class that huggingface_hub makes public
        raise PublishError(f"{_reason(error, repo_id)}; nothing was published") from error
    access = (account.get("auth") or {}).get("accessToken") or {}
    if access.get("role") == "read":
        raise PublishError(
            f"the token {access.get('displayName', '')!r} may only read; publishing {repo_id} needs {NEEDED}. "
            "Nothing was published"
        )
    return repo_id if "/" in repo_id else f"{account['name']}/{repo_id}"


def _taken_back(api: HfApi, repo_id: str, token: str | None) -> str:
    try:
        api.delete_repo(repo_id, token=token, missing_ok=True)
    except Exception:
        return f", but an empty repository {repo_id} was made and could not be removed"
    return ""


def _reason(error: Exception, repo_id: str) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return f"the token is not valid; publishing {repo_id} needs {NEEDED}"
    if status in (403, 404):
        return f"the token has no right to write to {repo_id}; it needs {NEEDED}, and to belong to its owner"
    if status is None:
        return f"the Hub cannot be reached, or answers in a way that is not understood ({error!r})"
    return f"the Hub refused {repo_id} ({error})"

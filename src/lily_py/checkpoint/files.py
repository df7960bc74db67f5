"""Which folder a checkpoint is, which safetensors files belong to it, and its download from Hugging Face."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lily_py import demo
from lily_py.checkpoint.fields import read_json
from lily_py.errors import CheckpointError, CheckpointNotFoundError, InvalidArgumentError

INDEX_NAME = "model.safetensors.index.json"
DESCRIPTION_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "*.txt")
DOWNLOAD_PATTERNS = (*DESCRIPTION_PATTERNS, "*.safetensors")

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class ShardList:
    """The weight files of a folder.

    Attributes:
        paths: the files, in order of name.
        index: tensor name -> position in `paths`, or None if the folder has no index.
    """

    paths: tuple[Path, ...]
    index: dict[str, int] | None


def resolve_folder(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: bool | None = None,
    patterns: Sequence[str] = DOWNLOAD_PATTERNS,
) -> Path:
    """Return the local folder (or file) of a checkpoint, downloading a Hugging Face repository if need be.

    Args:
        path_or_repo: ``"demo"`` (the model that ships with lily), a folder, or a repository ``owner/name``.
        revision: branch, tag or commit of a repository.
        progress: show bars while downloading; None shows them on a terminal and in notebooks only.
        patterns: which files of a repository are needed.

    Raises:
        CheckpointNotFoundError: no such folder, repository, revision or cached copy.
        CheckpointError: the download failed otherwise.
    """
    if path_or_repo == "demo":
        return demo.path()
    if not isinstance(path_or_repo, str | os.PathLike):
        raise InvalidArgumentError(f"a checkpoint must be a path or a repository id, got {path_or_repo!r}")
    name = os.fspath(path_or_repo)
    path = existing_path(name)
    if path is not None:
        return path
    if isinstance(path_or_repo, os.PathLike) or not _REPOSITORY.fullmatch(name):
        raise CheckpointNotFoundError(
            f"{name!r} is neither an existing folder nor a Hugging Face repository id such as "
            "'mlx-community/Qwen3.6-35B-A3B-4bit'"
        )
    return download(name, revision=revision, progress=progress, patterns=patterns)


def existing_path(name: str) -> Path | None:
    """Return the path (``~`` expanded) if something is there, else None."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError, ValueError):
        # Too long, of an unknown user, or with a null byte: nothing can be there.
        return None


def download(
    repository: str, *, revision: str | None, progress: bool | None, patterns: Sequence[str]
) -> Path:
    """Fetch the files of a repository that match `patterns` into the Hugging Face cache; return the folder.

    Interrupted downloads resume; ``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN`` and the rest are honoured.
    """
    # Imported here: it costs a third of a second, which a local folder needn't pay.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(patterns),
                tqdm_class=None if progress is None else _bar(progress),
            )
        )
    except errors.GatedRepoError as error:
        raise CheckpointNotFoundError(
            f"{repository}: access is restricted; accept its terms on huggingface.co and set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointNotFoundError(f"{repository}: no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{repository}: no such folder here and no such repository on Hugging Face "
            "(a private one needs HF_TOKEN)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{repository}: not in the local cache, and Hugging Face can't be reached "
            "or HF_HUB_OFFLINE is set"
        ) from error
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError, ValueError) as error:
        raise CheckpointError(f"{repository}: download failed ({error})") from error


def list_shards(folder: Path) -> ShardList:
    """Return the weight files of a folder; an index is authoritative, and every file it names must exist.

    Raises:
        CheckpointNotFoundError: a file that the index (or the numbering of shards) promises is missing,
            or there are no weights at all.
        CheckpointError: the index is malformed.
    """
    index_path = folder / INDEX_NAME
    if index_path.exists():
        return _indexed(folder, index_path)
    single = folder / "model.safetensors"
    if single.exists():
        return ShardList((single,), None)
    numbered = sorted(path for path in folder.glob("model-*.safetensors") if _SHARD.fullmatch(path.name))
    if numbered:
        last = _SHARD.fullmatch(numbered[-1].name)
        count = int(last.group(1)) if last else 0
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        return ShardList(
            tuple(_existing(folder, name, "the numbering of the shards") for name in names), None
        )
    raise CheckpointNotFoundError(
        f"{folder}: no weights; expected model.safetensors or {INDEX_NAME} (GGUF files aren't supported)"
    )


def read_weight_map(index_path: Path) -> dict[str, str]:
    """Return tensor name -> file name of an index, each a plain path below the index's folder."""
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map is missing or empty")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain(name):
            raise CheckpointError(
                f"{index_path}: tensor {tensor!r} is said to lie in {name!r}, "
                "which isn't a safetensors file of this folder"
            )
    return weight_map


def _indexed(folder: Path, index_path: Path) -> ShardList:
    weight_map = read_weight_map(index_path)
    names = sorted(set(weight_map.values()))
    position = {name: i for i, name in enumerate(names)}
    paths = tuple(_existing(folder, name, INDEX_NAME) for name in names)
    return ShardList(paths, {tensor: position[name] for tensor, name in weight_map.items()})


def _is_plain(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        not path.is_absolute()
        and ".." not in path.parts
        and path.suffix == ".safetensors"
        and "\\" not in name
        and "\0" not in name
    )


def _existing(folder: Path, name: str, promised_by: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{path}: promised by {promised_by} but missing; the download is incomplete, fetch it again"
        )
    return path


def _bar(shown: bool) -> Any:
    """Return a tqdm class whose bars are always, or never, shown (the hub's own decide by the terminal)."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            keywords.pop("name", None)
            super().__init__(*args, **{**keywords, "disable": not shown})

    return Bar

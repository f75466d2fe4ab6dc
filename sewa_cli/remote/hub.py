"""Revisions on the Hugging Face hub. Cache, tokens and offline mode are huggingface_hub's own."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from sewa_cli.checkpoints.order import step_in
from sewa_cli.errors import ConfigError
from sewa_cli.remote.places import failure, file_system

_PLACE: Final = re.compile(r"([^/]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")


def revisions(url: str, pattern: str) -> list[str]:
    """Return a URL for each branch and tag whose name matches, in the order of their numbers."""
    file_system(url)  # says what to install
    from huggingface_hub import HfApi, constants, scan_cache_dir

    repo = url.removeprefix("hf://").strip("/")
    if repo.count("/") != 1 or "@" in repo:
        raise ConfigError(f"{url}: --revisions needs a repository alone, hf://ORGANISATION/NAME")
    try:
        if constants.HF_HUB_OFFLINE:
            repos = [one for one in scan_cache_dir().repos if one.repo_id == repo]
            names = {ref for one in repos for ref in one.refs}
        else:
            refs = HfApi().list_repo_refs(repo)
            names = {ref.name for ref in (*refs.branches, *refs.tags)}
    except Exception as error:
        raise failure(url, error) from error
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if not matching:
        raise ConfigError(f"--revisions: no revision of {url} matches {pattern!r}; use another")
    matching.sort(key=lambda name: (step_in(Path(name)) or 0, name))
    return [f"hf://{repo}@{name}" for name in matching]


def cached_folder(place: str) -> Path | None:
    """In offline mode, return the folder of ORGANISATION/NAME@REVISION/… in the cache."""
    from huggingface_hub import constants, snapshot_download

    found = _PLACE.fullmatch(place)
    if not constants.HF_HUB_OFFLINE or found is None:
        return None
    repo, revision, inside = found.groups()
    return Path(snapshot_download(repo, revision=revision, local_files_only=True), inside or "")


def download(fs: Any, place: str) -> Path:
    """Return the file in the cache, fetched if it is not there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    found = fs.resolve_path(place)
    return Path(hf_hub_download(found.repo_id, found.path_in_repo, revision=found.revision))

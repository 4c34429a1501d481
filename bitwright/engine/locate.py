"""From what the user typed to a file on disk: the embedded demo, a hub file, or a path."""

import os
import re
from pathlib import Path

from bitwright.engine.gguf_file import read_gguf
from bitwright.engine.shards import sibling_names
from bitwright.errors import InputError

DEMO = "demo"
DEMO_FILE = Path(__file__).resolve().parent.parent / "demo_model" / "demo-F16.gguf"
HUB = re.compile(r"hf:(?P<repo>[^/@]+/[^/@]+)/(?P<file>[^@]+)(?:@(?P<revision>.+))?")
COMPANIONS = ("mmproj", "imatrix", "-mtp", "draft")  # files beside a model that are not the model
SHOWN = 10


def locate(spec: str | Path, *, revision: str | None = None) -> Path:
    """The local path of a model; downloads it if it is on the hub.

    Raises:
        InputError: nothing is there, or it is a folder.
    """
    if spec == DEMO:
        return DEMO_FILE
    if isinstance(spec, str) and spec.startswith("hf:"):
        return _from_hub(spec, revision)
    path = Path(spec)
    if os.path.isdir(path):  # noqa: PTH112 - unlike Path.is_dir, never raises (too long a name)
        raise InputError(f"{path} is a folder: name one of its models{_candidates(path)}")
    return path


def _candidates(folder: Path) -> str:
    """The GGUFs of a folder that look like models, one per set of shards."""
    names = sorted(p.name for p in folder.glob("*.gguf") if p.is_file() and _looks_like_model(p))
    wholes = [name for name in names if sibling_names(name)[0] == name]
    if not wholes:
        return " (it has no .gguf file that is a model)"
    more = f" and {len(wholes) - SHOWN} more" if len(wholes) > SHOWN else ""
    return f": {', '.join(wholes[:SHOWN])}{more}"


def _looks_like_model(path: Path) -> bool:
    if any(word in path.name.lower() for word in COMPANIONS):
        return False
    try:
        kv = read_gguf(path).kv
    except InputError:
        return False
    kind = kv["general.type"].value if "general.type" in kv else "model"
    return kind == "model" and ("general.architecture" in kv or "split.no" in kv)


def _from_hub(spec: str, revision: str | None) -> Path:
    """Download a file, and the other shards of its set, into the hub's cache."""
    found = HUB.fullmatch(spec)
    if found is None:
        raise InputError(f"{spec} is no hub file: write hf:owner/repo/file.gguf, with @revision")
    folder, _, name = found["file"].rpartition("/")
    pinned = found["revision"] or revision
    paths = [
        _download(found["repo"], f"{folder}/{part}" if folder else part, pinned)
        for part in sibling_names(name)
    ]
    return next(path for path in paths if path.name == name)


def _download(repo: str, file: str, revision: str | None) -> Path:
    # Imported here: it takes half a second, and only hub files need it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, file, revision=revision))
    except LocalEntryNotFoundError as error:
        raise InputError(
            f"hf:{repo}/{file} is not in the local cache, and the hub cannot be reached (offline"
            " or HF_HUB_OFFLINE=1): download it first, or give a path"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"hf:{repo}/{file} cannot be downloaded ({reason}): check owner, repository, file name,"
            " revision, and HF_TOKEN for a gated model"
        ) from error

"""The files of a split model: `<prefix>-0000i-of-0000N.gguf`, metadata in the first.

Siblings are looked up by the given file's own prefix and total, in its own folder; nothing that
stands inside a file can name another one.
"""

import re
from dataclasses import replace
from pathlib import Path

from bitwright.engine.gguf_file import GgufFile, read_gguf
from bitwright.errors import InputError

SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
SPLIT_KEYS = frozenset({SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS})


def shard_name(prefix: str, index: int, total: int) -> str:
    """File name of the shard with that index, counted from 0."""
    return f"{prefix}-{index + 1:05d}-of-{total:05d}.gguf"


def base_name(path: Path) -> str:
    """The model's name: the file name without suffix and without the shard number."""
    found = SHARD_NAME.fullmatch(path.name)
    return found["prefix"] if found else path.name.removesuffix(".gguf")


def sibling_names(name: str) -> tuple[str, ...]:
    """File names of all shards of the set that a file name belongs to; itself if it is whole."""
    found = SHARD_NAME.fullmatch(name)
    if found is None:
        return (name,)
    total = int(found["total"])
    return tuple(shard_name(found["prefix"], index, total) for index in range(total))


def read_shards(path: Path) -> tuple[GgufFile, ...]:
    """All files of the model that ``path`` is, or is a shard of, in order.

    Raises:
        InputError: a shard is missing, out of place, from another set, or a link out of the folder.
    """
    given = read_gguf(path)
    count = _split_value(given, SPLIT_COUNT, default=1)
    found = SHARD_NAME.fullmatch(path.name)
    total = int(found["total"]) if found else 1
    if count != total:
        raise InputError(
            f"{path} says that it is one of {count} shards, but its name says"
            f" {f'one of {total}' if found else 'that it is whole'}: give the shards their"
            " original names, <prefix>-0000i-of-0000N.gguf"
        )
    if total == 1:
        return (given,)
    names = sibling_names(path.name)
    if path.name not in names:
        raise InputError(f"{path}: there is no such shard among {total}: check its name")
    shards = tuple(
        _read_sibling(path, path.parent / name, given, index) for index, name in enumerate(names)
    )
    _check_set(shards)
    return shards


def _split_value(file: GgufFile, key: str, default: int | None = None) -> int:
    entry = file.kv.get(key)
    value = default if entry is None else entry.value
    if not isinstance(value, int):
        raise InputError(f"{file.path}: {key} is missing or no number: split the model again")
    return value


def _read_sibling(given: Path, path: Path, read: GgufFile, index: int) -> GgufFile:
    if path == given:
        shard = read
    else:
        if not path.exists():
            raise InputError(f"shard {path} is missing: put all shards of {given.name} beside it")
        _check_link(given, path)
        shard = read_gguf(path)
    return replace(shard, tensors=tuple(replace(t, shard=index) for t in shard.tensors))


def _check_link(given: Path, path: Path) -> None:
    """A link may leave the folder only to where the given file's own link leads (a hub cache)."""
    home = {given.parent.resolve(), given.resolve().parent}
    if path.resolve().parent not in home:
        raise InputError(
            f"shard {path} is a link to {path.resolve()}, outside the folder of {given.name}:"
            " put the shard itself there"
        )


def _check_set(shards: tuple[GgufFile, ...]) -> None:
    total = len(shards)
    expected = _split_value(shards[0], SPLIT_TENSORS, default=0)
    for index, shard in enumerate(shards):
        number = _split_value(shard, SPLIT_NO)
        count = _split_value(shard, SPLIT_COUNT)
        if (number, count) != (index, total):
            raise InputError(
                f"{shard.path} holds shard {number + 1} of {count}, but its name says"
                f" {index + 1} of {total}: the shards are mixed up, get them again"
            )
        announced = _split_value(shard, SPLIT_TENSORS, default=expected)
        if announced != expected:
            raise InputError(
                f"{shard.path} belongs to a model of {announced} tensors, the first shard to one"
                f" of {expected}: the shards are mixed up, get them again"
            )
    present = sum(len(shard.tensors) for shard in shards)
    if expected and present != expected:
        raise InputError(
            f"the {total} shards of {shards[0].path} hold {present} tensors, but"
            f" split.tensors.count says {expected}: a shard is incomplete, get them again"
        )

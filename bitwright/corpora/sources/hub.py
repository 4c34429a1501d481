"""Hugging Face data sets, streamed row by row, without loading scripts."""

import os
from collections.abc import Iterator
from pathlib import Path

from bitwright.corpora.recipe import HubSource
from bitwright.corpora.records import Document
from bitwright.corpora.sources.reading import resolve
from bitwright.corpora.sources.rows import row_document
from bitwright.errors import ConfigError, InputError

_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_YES = ("1", "on", "yes", "true")


def hub_documents(source: HubSource, category: str, folder: Path) -> Iterator[Document | None]:
    """The documents in the data set's order, None for a row with nothing to score.

    Raises:
        ConfigError: offline mode is set, or the local folder is missing.
        InputError: no such data set, config, split or revision; or the network fails.
    """
    local = source.id.startswith((".", "/", "~"))
    address = str(resolve(source.id, folder)) if local else source.id
    if local and not Path(address).is_dir():
        raise ConfigError(f"{source.id} is not a folder; paths start at the recipe's folder")
    if not local and any(os.environ.get(name, "").lower() in _YES for name in _OFFLINE):
        raise ConfigError(
            f"the hub data set {source.id} cannot be streamed while HF_HUB_OFFLINE is set: unset "
            "it, or use a jsonl or text source"
        )
    name = source.id if not local else Path(address).resolve().name
    for number, row in enumerate(_rows(source, address), start=1):
        yield row_document(
            row,
            fields=source.fields,
            wanted=source.format,
            category=category,
            source=f"{name}@{source.revision}",
            id=f"{name}:{number}",
        )


def _rows(source: HubSource, address: str) -> Iterator[dict[str, object]]:
    import datasets  # takes a second to import: only for recipes that need it
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    datasets.disable_progress_bars()
    try:
        stream = datasets.load_dataset(
            address,
            source.config,
            split=source.split,
            revision=source.revision,
            streaming=True,
        )
        yield from stream
    except (ValueError, OSError, RuntimeError, HfHubHTTPError, DatasetsError) as error:
        # Everything that datasets raises for a wrong address, script or connection is one of these.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the data set {source.id} (config {source.config}, split {source.split}, revision "
            f"{source.revision}) cannot be read: {reason}"
        ) from None

"""The text that a file was calibrated on, to keep evaluation items out of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bitwright.corpora.leaks import corpus_texts
from bitwright.corpora.store import load_corpus
from bitwright.engine.model_file import ModelFile
from bitwright.engine.tokenizer import Tokenizer
from bitwright.errors import InputError


def own_run(model: ModelFile) -> tuple[Path, ...]:
    """The run folder that a file lies in, whose corpora have shaped it; none for other files."""
    folder = model.path.parent
    return (folder,) if (folder / "corpus" / "corpus.json").is_file() else ()


def calibration_texts(paths: Sequence[Path], tokenizer: Tokenizer) -> dict[str, str]:
    """Name → text of what a file was calibrated on: text files, corpus folders, run folders.

    Raises:
        InputError: a path that holds none of these.
    """
    texts: dict[str, str] = {}
    for path in paths:
        if path.is_file():
            texts[path.name] = path.read_text(encoding="utf-8", errors="replace")
            continue
        folders = [folder for folder in (path / "corpus", path) if folder.is_dir()]
        found = [folder for folder in folders if (folder / "corpus.json").is_file()]
        if not found:
            raise InputError(
                f"{path} is neither a text file nor a folder of `bitwright corpus`: give the text "
                "that the file was calibrated on"
            )
        for category, corpus in load_corpus(found[0]).items():
            # The report split is for scoring; everything else has shaped the file.
            used = tuple(chunk for chunk in corpus.chunks if chunk.split != "report")
            for name, text in corpus_texts(replace(corpus, chunks=used), tokenizer).items():
                texts[f"{category}/{name}"] = text
    return texts

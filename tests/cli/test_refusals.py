"""Bad input at the command line: one line, exit codes, nothing half-written."""

import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bitwright.engine.imatrix_file import Imatrix, ImatrixEntry, write_imatrix
from tests.cli.lines import quantize_line, run_line
from tests.tiny import split_gguf, tiny_gguf
from tests.workflows.support import bitwright, listing, started, write_recipe, write_workflow

Damage = Callable[[bytes], bytes]


# A model that cannot be used: GG-01, GG-02, GG-12


def rewritten(model: Path, path: Path, change: Damage) -> Path:
    path.write_bytes(change(model.read_bytes()))
    return path


def with_version(version: int, order: str = "<") -> Damage:
    return lambda data: data[:4] + struct.pack(f"{order}I", version) + data[8:]


def with_type_99(data: bytes) -> bytes:
    """The type id of the first matrix's info becomes 99."""
    name = b"blk.0.attn_q.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    n_dims = struct.unpack_from("<I", data, at)[0]
    place = at + 4 + 8 * n_dims
    return data[:place] + struct.pack("<I", 99) + data[place + 4 :]


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 99\n"
BROKEN: dict[str, tuple[Damage, str]] = {
    "last byte removed": (lambda data: data[:-1], r"output_norm|token_embd|blk\.0"),
    "cut inside a tensor": (lambda data: data[: len(data) // 2], r"blk\.0|token_embd"),
    "cut inside the tensor table": (lambda data: data[:15000], "truncated|ends|bytes"),
    "only the first 24 bytes": (lambda data: data[:24], "truncated|ends|bytes"),
    "empty": (lambda data: b"", "empty|0 bytes|truncated|ends"),
    "foreign magic": (lambda data: b"GGML" + data[4:], "not a GGUF"),
    "version 1": (with_version(1), "version 1"),
    "version 99": (with_version(99), "version 99"),
    "big-endian": (with_version(3, ">"), "big-endian"),
    "LFS pointer": (lambda data: LFS, "LFS"),
    "HTML page": (lambda data: b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    "type id 99": (with_type_99, "type id 99"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused_with_its_own_reason(home: Path, tmp_path: Path, name: str):
    change, reason = BROKEN[name]
    broken = rewritten(home / "tiny-F16.gguf", tmp_path / "broken.gguf", change)
    started_at = time.monotonic()
    told = run_line(home, tmp_path / "out", broken).refusal()
    assert time.monotonic() - started_at < 2
    assert re.search(reason, told, re.IGNORECASE), told
    assert "broken.gguf" in told or name == "type id 99"
    assert listing(tmp_path).keys() == {"broken.gguf"}
    assert not (tmp_path / "out").exists()
    assert bitwright("inspect", broken).refusal()


def test_every_verb_that_takes_a_model_refuses_a_truncated_one(home: Path, tmp_path: Path):
    broken = rewritten(home / "tiny-F16.gguf", tmp_path / "cut.gguf", lambda data: data[:-1])
    out, model = tmp_path / "out", ("--model", broken)
    lines = (
        ("run", home / "small.toml", "--out", out),
        ("run", home / "small.toml", "--out", out, "--dry-run"),
        ("corpus", "code", "--out", out),
        ("imatrix", "--corpus", home, "--out", out),
        ("damage", "--corpus", home, "--out", out),
        ("allocate", "--damage", home, "--budget", "4 bpw", "--target", "code", "--out", out),
        ("quantize", "--layout", "Q4_K_M", "--out", out),
        ("evaluate", home / "tiny-F16.gguf", "--corpus", home),
    )
    for line in lines:
        told = bitwright(*line, *model).refusal()
        assert "cut.gguf" in told, line
        assert "bytes" in told, line
    assert listing(tmp_path).keys() == {"cut.gguf"}


def test_debug_shows_the_traceback(home: Path, tmp_path: Path):
    broken = rewritten(home / "tiny-F16.gguf", tmp_path / "cut.gguf", lambda data: data[:-1])
    with started("inspect", broken, "--debug") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"Traceback" in err
    assert b"InputError" in err


def test_an_unknown_architecture_names_the_library_and_its_reason(home: Path, tmp_path: Path):
    model = tiny_gguf(tmp_path / "new.gguf", arch="made_up_arch", n_layer=1)
    told = run_line(home, tmp_path / "out", model).refusal()
    assert "made_up_arch" in told
    assert "unknown model architecture" in told
    assert "llama" in told
    assert not (tmp_path / "out").exists()


# The wrong kind of file, or an already quantized one: GG-13, GG-17


def test_other_kinds_of_gguf_are_named(home: Path, tmp_path: Path):
    told = run_line(home, tmp_path / "out", home / "imatrix.gguf").refusal()
    assert "importance matrix" in told
    assert "--imatrix" in told
    clip = tiny_gguf(tmp_path / "mmproj.gguf", arch="clip", n_layer=1)
    assert "projector" in run_line(home, tmp_path / "out", clip).refusal()
    kind = {"general.type": "adapter"}
    adapter = tiny_gguf(tmp_path / "lora.gguf", n_layer=1, extra_kv=kind)
    assert "adapter" in run_line(home, tmp_path / "out", adapter).refusal()
    told = quantize_line(
        home, tmp_path / "o.gguf", "Q4_K_M", "--imatrix", home / "moe-F16.gguf"
    ).refusal()
    assert "no importance matrix" in told
    folder = run_line(home, tmp_path / "out", home).refusal()
    assert "tiny-F16.gguf" in folder
    assert "imatrix.gguf" not in folder


def test_a_quantized_model_is_refused_before_any_stage(home: Path, tmp_path: Path):
    told = run_line(home, tmp_path / "out", home / "tiny-Q8_0.gguf").refusal()
    assert "Q8_0" in told
    assert "token_embd.weight" in told or "blk.0." in told
    assert "--allow-requantize" in told
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_there(home: Path, tmp_path: Path):
    assert "no.gguf" in run_line(home, tmp_path / "out", tmp_path / "no.gguf").refusal()
    told = run_line(home, tmp_path / "out", "hf:nobody/nothing/file.gguf").refusal()
    assert "hf:nobody/nothing/file.gguf" in told
    assert "offline" in told
    assert "hf:owner/repo/file.gguf" in run_line(home, tmp_path / "out", "hf:nobody").refusal()


# Split files: GG-04


def test_lost_mixed_and_foreign_shards_are_refused(home: Path, tmp_path: Path):
    shutil.copy(home / "tiny-F16.gguf", tmp_path / "big.gguf")
    shards = split_gguf(tmp_path / "big.gguf", 3)
    first, second, third = (shard.read_bytes() for shard in shards)
    out = tmp_path / "out"

    shards[2].unlink()
    assert shards[2].name in run_line(home, out, shards[0]).refusal()

    shards[1].write_bytes(third)
    shards[2].write_bytes(second)
    assert shards[1].name in run_line(home, out, shards[0]).refusal()

    count = b"split.count" + struct.pack("<IH", 2, 3)
    assert second.count(count) == 1
    shards[1].write_bytes(second.replace(count, b"split.count" + struct.pack("<IH", 2, 4)))
    shards[2].write_bytes(third)
    assert shards[1].name in run_line(home, out, shards[2]).refusal()

    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "part.gguf").write_bytes(second)
    shards[1].unlink()
    shards[1].symlink_to(outside / "part.gguf")
    told = run_line(home, out, shards[0])
    assert told.code == 0 or shards[1].name in told.refusal()
    assert first == shards[0].read_bytes()


# Rows that blocks do not divide: GG-06


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        *(("Q2_K", "Q4_0"), ("Q3_K_S", "Q4_0"), ("Q4_K_S", "Q5_0"), ("Q5_K_S", "Q5_1")),
        *(("Q6_K", "Q8_0"), ("IQ4_XS", "IQ4_NL"), ("IQ3_S", "IQ4_NL")),
    ],
)
def test_odd_rows_get_the_replacement_by_stock_type_and_by_rule(
    home: Path, tmp_path: Path, asked: str, used: str
):
    model = tiny_gguf(tmp_path / "odd.gguf", n_layer=1, n_embd=96, n_ff=160, n_head=4)
    ran = quantize_line(home, tmp_path / "stock.gguf", asked, "--model", model)
    assert ran.code == 0, ran.err
    types = inspect_types(tmp_path / "stock.gguf")
    assert used in types
    assert types.keys() <= {used, "F32", "F16", "Q4_0", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"}
    layout = tmp_path / "rules.txt"
    layout.write_text(f"ffn_up={asked.removesuffix('_S') if '_K' in asked else asked}\n", "utf-8")
    ran = quantize_line(home, tmp_path / "rule.gguf", layout, "--model", model, "--json")
    assert ran.code == 0, ran.err
    assert any("rows of 96" in note for note in ran.json["notes"])
    assert inspect_types(tmp_path / "rule.gguf")[used]["tensors"] == 1


def inspect_types(path: Path) -> dict[str, dict[str, int]]:
    types: dict[str, dict[str, int]] = bitwright("inspect", path, "--json").json["types"]
    return types


# Rules and types: GG-08, IM-09, QZ-01, QZ-04

RULES = {
    r"ffn_gate_inp=Q4_K": "never quantized",
    "blk.0.attn_q.weight=Q4_K_M": "Q4_K",
    "attn_q=q9_0": "Q6_K",
    "attn_x=Q4_K": "matches no tensor",
    "attn_(q=Q4_K": "no regular expression",
    r"\Dattn=Q4_K": "matches no tensor|no rule",
    "# a comment": "no rule",
    "": "no rules",
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_cannot_be_used_are_refused(home: Path, tmp_path: Path, rule: str):
    layout = tmp_path / "rules.txt"
    layout.write_text(f"{rule}\n", "utf-8")
    model = ("--model", home / "moe-F16.gguf")
    told = quantize_line(home, tmp_path / "out.gguf", layout, *model).refusal()
    assert re.search(RULES[rule], told), told
    assert listing(tmp_path).keys() == {"rules.txt"}


def test_a_rule_equal_to_the_global_type_is_obeyed(home: Path, tmp_path: Path):
    layout = tmp_path / "rules.txt"
    layout.write_text(r"^blk\.0\.attn_v\.weight$=iq4_xs" + "\nblk=IQ4_XS\n", "utf-8")
    ran = quantize_line(home, tmp_path / "out.gguf", layout)
    assert ran.code == 0, ran.err
    assert inspect_types(tmp_path / "out.gguf")["IQ4_XS"]["tensors"] == 7


def test_types_that_need_an_imatrix_are_refused_all_at_once(home: Path, tmp_path: Path):
    told = quantize_line(home, tmp_path / "out.gguf", "IQ2_XXS").refusal()
    assert "imatrix" in told
    assert all(f"blk.0.{role}.weight" in told for role in ("attn_q", "ffn_up", "ffn_gate"))
    assert "token_embd" not in told
    assert "imatrix" in quantize_line(home, tmp_path / "out.gguf", "Q2_K_S").refusal()
    ran = quantize_line(home, tmp_path / "out.gguf", "Q2_K")
    assert ran.code == 0, ran.err


def test_neither_a_layout_file_nor_a_stock_type(home: Path, tmp_path: Path):
    told = quantize_line(home, tmp_path / "out.gguf", tmp_path / "no-such.txt").refusal()
    assert "no-such.txt" in told
    assert "Q4_K_M" in told


# Importance matrices: IM-05, IM-06


def legacy(entries: int, name: bytes, n_values: int, values: bytes) -> bytes:
    head = struct.pack("<i", entries) + struct.pack("<i", len(name)) + name
    return head + struct.pack("<ii", 4, n_values) + values


BAD_IMATRIX = {
    "cut in half": legacy(2, b"blk.0.attn_q.weight", 256, bytes(512)),
    "length 2^31": legacy(1, b"blk.0.attn_q.weight", 2**31 - 1, bytes(64)),
    "negative length": legacy(1, b"blk.0.attn_q.weight", -5, bytes(64)),
    "text": b"this is no importance matrix, only text that is long enough",
    "empty": b"",
    "another model's": legacy(1, b"blk.0.attn_q.weight", 64, struct.pack("<64f", *[1.0] * 64)),
}


@pytest.mark.parametrize("name", BAD_IMATRIX)
def test_a_bad_imatrix_is_refused(home: Path, tmp_path: Path, name: str):
    path = tmp_path / "bad.dat"
    path.write_bytes(BAD_IMATRIX[name])
    assert quantize_line(home, tmp_path / "out.gguf", "Q4_K_M", "--imatrix", path).refusal()
    if name != "another model's":
        told = bitwright("imatrix", "--merge", path, "--out", tmp_path / "m.gguf").refusal()
        assert "bad.dat" in told
    assert listing(tmp_path).keys() == {"bad.dat"}


@pytest.mark.parametrize("lost", ["imatrix.chunk_size", ".counts"])
def test_a_gguf_imatrix_without_a_part_is_refused(home: Path, tmp_path: Path, lost: str):
    data = (home / "imatrix.gguf").read_bytes()
    other = lost[:-1] + "x"
    path = tmp_path / "bad.gguf"
    path.write_bytes(data.replace(lost.encode(), other.encode()))
    told = quantize_line(home, tmp_path / "out.gguf", "Q4_K_M", "--imatrix", path).refusal()
    assert "bad.gguf" in told


def test_imatrices_with_other_tensors_are_not_merged(home: Path, tmp_path: Path):
    entry = ImatrixEntry(np.ones((1, 96), np.float32), np.ones(1, np.float32))
    other = Imatrix({"blk.0.ffn_up_exps.weight": entry}, 1, 128, ("x",))
    write_imatrix(other, tmp_path / "other.gguf")
    line = ("--merge", home / "imatrix.gguf", "--merge", tmp_path / "other.gguf")
    told = bitwright("imatrix", *line, "--out", tmp_path / "out.gguf").refusal()
    assert "are of different models" in told
    assert not (tmp_path / "out.gguf").exists()


def test_imatrices_of_two_models_are_not_merged(home: Path, tmp_path: Path):
    other = ImatrixEntry(np.ones((1, 96), np.float32), np.ones(1, np.float32))
    write_imatrix(Imatrix({"blk.0.attn_q.weight": other}, 1, 128, ("x",)), tmp_path / "other.gguf")
    line = ("--merge", home / "imatrix.gguf", "--merge", tmp_path / "other.gguf")
    told = bitwright("imatrix", *line, "--out", tmp_path / "out.gguf").refusal()
    assert "blk.0.attn_q.weight" in told
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("share", ["0", "-1", "nan", "inf", "much"])
def test_shares_must_be_positive_numbers(home: Path, tmp_path: Path, share: str):
    line = ("--merge", f"{home / 'imatrix.gguf'}={share}", "--out", tmp_path / "out.gguf")
    assert "positive number" in bitwright("imatrix", *line).refusal()


# Corpora: IM-07


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty|no documents|0 documents|no text|tokens"),
        (b" \n\n \n", "no documents|0 documents|no text|tokens"),
        (b"too short a text for anything", r"\d+ (?:of its )?tokens|tokens"),
        (b"x = 1\n" * 50 + b"\xff\xfe broken", r"byte \d+"),
        ("x = 1\n".encode("utf-16") * 100, r"byte \d+|NUL|UTF-8"),
    ],
)
def test_a_corpus_that_is_too_short_or_not_text(
    home: Path, tmp_path: Path, content: bytes, reason: str
):
    (tmp_path / "text.txt").write_bytes(content)
    recipe = write_recipe(tmp_path, "code", "text.txt")
    model = ("--model", home / "tiny-F16.gguf")
    out = tmp_path / "corpus"
    told = bitwright("corpus", recipe, *model, "--out", out, "--quiet").refusal()
    assert re.search(reason, told), told
    workflow = write_workflow(tmp_path, code="code.toml")
    run = bitwright("run", workflow, *model, "--out", tmp_path / "run", "--quiet").refusal()
    assert re.search(reason, run), run
    assert not list(tmp_path.rglob("*.gguf"))


# Workflows and options


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ('ladder = "K"\nlader = "K"', "lader"),
        ('ladder = "X"', "X"),
        ("[pins]\n'blk.9.*' = 'Q4_K'", "blk.9"),
        ("[chunks]\ntraining = 3", "training"),
        ("seed = 'one'", "seed"),
        ("= broken", "TOML"),
    ],
)
def test_a_workflow_that_says_what_cannot_be_done(
    home: Path, tmp_path: Path, change: str, reason: str
):
    text = (home / "small.toml").read_text(encoding="utf-8")
    key = change.splitlines()[0].split(" ")[0]
    if key == "[chunks]":
        text = text.replace("[chunks]", change)
    elif key == "[pins]":
        text += f"\n{change}\n"
    else:
        kept = [line for line in text.splitlines() if not line.startswith(f"{key} =")]
        text = "\n".join([change, *kept])
    path = tmp_path / "changed.toml"
    path.write_text(text, encoding="utf-8")
    line = ("--model", home / "tiny-F16.gguf", "--out", tmp_path / "out")
    told = bitwright("run", path, *line).refusal()
    assert reason in told
    assert not (tmp_path / "out").exists()


def test_unknown_names_list_the_known_ones(home: Path, tmp_path: Path):
    model = ("--model", home / "tiny-F16.gguf")
    assert "coding-q3_k_s" in bitwright("run", "nothing", *model).refusal()
    told = bitwright("corpus", "nothing", *model, "--out", tmp_path / "c").refusal()
    assert "tool_calling" in told
    told = run_line(home, tmp_path / "out", "", "--working-type", "Q4_K").refusal()
    assert "BF16" in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        ("run", "coding-q3_k_s"),
        ("run", "--model", "demo"),
        ("quantize", "--model", "demo", "--layout", "Q4_K_M"),
        ("nothing",),
        ("run", "coding-q3_k_s", "--model", "demo", "--threads", "-1"),
        ("run", "coding-q3_k_s", "--model", "demo", "--seed", "x"),
        ("imatrix", "--out", "x.gguf"),
        ("inspect", "--no-such-option", "x"),
    ],
)
def test_usage_errors_exit_with_2(line: tuple[str, ...], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = bitwright(*line)
    assert ran.code == 2
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert not list(tmp_path.iterdir())


def test_help_and_version():
    assert bitwright("--version").out.strip()
    for verb in ("run", "corpus", "imatrix", "damage", "allocate", "quantize", "evaluate"):
        ran = bitwright(verb, "--help")
        assert ran.code == 0
        assert "--model" in ran.out
        assert "--json" in ran.out
        assert "--debug" in ran.out

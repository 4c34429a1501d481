"""Each stage alone, on files that another tool may have made."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest

from bitwright.engine.gguf_file import read_gguf
from bitwright.engine.imatrix_file import read_imatrix
from bitwright.engine.model_file import open_model
from bitwright.engine.session import SessionOptions
from bitwright.engine.upstream import FTYPES, upstream_layout, upstream_quantize
from bitwright.workflows.context import RunContext
from bitwright.workflows.progress import Silent
from bitwright.workflows.run_folder import RunFolder
from bitwright.workflows.spec import load_workflow
from bitwright.workflows.stage_report import command_of
from bitwright.workflows.verbs import RunChoices, overridden
from tests.tiny import split_gguf, tiny_gguf
from tests.workflows.conftest import Finished
from tests.workflows.support import bitwright, write_recipe

TEXT = "\n\n".join(
    f"def add_{i}(a, b):\n    # the sum of {i * 7919} and what is given, in that order\n"
    f"    return a + b + {i * 104729}\n\nprint(add_{i}({i * i}, {i + 3}))"
    for i in range(400)
)


@dataclass(frozen=True, slots=True)
class Made:
    """Files that the stages left, one after the other."""

    folder: Path
    model: Path
    corpus: Path
    imatrix: Path
    damage: Path
    layout: Path
    gguf: Path
    told: Mapping[str, dict]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """corpus → imatrix → damage → allocate → quantize, each by its verb."""
    folder = tmp_path_factory.mktemp("stages")
    model = tiny_gguf(folder / "tiny-F16.gguf", n_layer=1)
    corpus, damage = folder / "corpus", folder / "damage"
    imatrix, layout, out = folder / "code.gguf", folder / "layout.txt", folder / "out.gguf"
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    recipe = write_recipe(folder, "code", "text.txt")
    small = "\n[chunks]\ncalibrate = 2\nprobe = 1\nselect = 1\nreport = 2\n"
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(text.replace("\n[[sources]]", f"{small}\n[[sources]]"), encoding="utf-8")
    common = ("--model", model, "--json")
    lines = {
        "corpus": ("corpus", recipe, "--out", corpus, "--ctx", "192", *common),
        "imatrix": ("imatrix", "--corpus", corpus, "--out", imatrix, *common),
        "damage": (
            *("damage", "--corpus", corpus, "--imatrix", imatrix, "--out", damage),
            *("--working-type", "file", *common),
        ),
        "allocate": (
            *("allocate", "--damage", damage, "--imatrix", imatrix, "--budget", "5 bpw"),
            *("--target", "code", "--pin", "*.attn_v.weight=Q6_K", "--out", layout, *common),
        ),
        "quantize": (
            *("quantize", "--layout", layout, "--imatrix", imatrix, "--out", out, *common),
        ),
    }
    told = {}
    for verb, line in lines.items():
        ran = bitwright(*line)
        assert ran.code == 0, ran.err
        assert len(ran.out.splitlines()) == 1
        told[verb] = ran.json
    return Made(folder, model, corpus, imatrix, damage, layout, out, told)


def test_the_stages_fit_together(made: Made):
    assert made.told["corpus"]["corpora"].keys() == {"code"}
    assert made.told["imatrix"]["chunks"] == 2
    assert read_imatrix(made.imatrix).chunk_size == 192  # the corpus's context, without --ctx
    assert made.told["damage"]["tensors"] == 8
    allocated, quantized = made.told["allocate"], made.told["quantize"]
    assert allocated["size_bytes"] == quantized["size_bytes"] == made.gguf.stat().st_size
    assert allocated["size_bytes"] <= allocated["budget_bytes"]
    types = {t.name: t.type for t in read_gguf(made.gguf).tensors}
    assert types["blk.0.attn_v.weight"] == "Q6_K"
    assert any("attn_v" in note for note in allocated["notes"])


def test_evaluate_scores_files_of_any_tool_and_goes_on_where_it_stopped(made: Made, tmp_path: Path):
    other = tmp_path / "upstream-Q4_K_M.gguf"
    upstream_quantize(open_model(made.model), other, "Q4_K_M", read_imatrix(made.imatrix))
    line = ("evaluate", made.gguf, other, "--model", made.model, "--corpus", made.corpus)
    ran = bitwright(*line, "--out", tmp_path / "scores", "--json")
    assert ran.code == 0, ran.err
    assert [entry["label"] for entry in ran.json["files"]] == [made.gguf.name, other.name]
    scores = {entry["label"]: entry["scores"]["code"] for entry in ran.json["files"]}
    assert all(s["kld_nats"] > 0 and s["n_tokens"] > 50 for s in scores.values())
    again = bitwright(*line, "--out", tmp_path / "scores", "--json")
    assert again.json["files"] == ran.json["files"]
    assert "KLD" in bitwright(*line).out


def test_evaluate_of_the_model_itself_is_zero(made: Made):
    ran = bitwright(
        "evaluate", made.model, "--model", made.model, "--corpus", made.corpus, "--json"
    )
    scores = ran.json["files"][0]["scores"]["code"]
    assert scores["kld_nats"] == pytest.approx(0, abs=1e-6)
    assert scores["top1"] == 1.0


@pytest.mark.parametrize("name", ["Q4_K_M", "q3_k_s", "IQ4_XS", "Q8_0", "F16"])
def test_a_stock_type_gives_upstreams_own_file_byte_for_byte(made: Made, tmp_path: Path, name: str):
    upstream_quantize(
        open_model(made.model), tmp_path / "theirs.gguf", name, read_imatrix(made.imatrix)
    )
    ours = tmp_path / "ours.gguf"
    line = ("quantize", "--model", made.model, "--imatrix", made.imatrix, "--layout", name)
    ran = bitwright(*line, "--out", ours)
    assert ran.code == 0, ran.err
    assert ours.read_bytes() == (tmp_path / "theirs.gguf").read_bytes()
    assert str(ours.stat().st_size) in ran.out.replace(",", "")


def test_a_layout_written_by_hand_with_patterns(made: Made, tmp_path: Path):
    layout = tmp_path / "mine.txt"
    layout.write_text("ffn_(up|gate)=q4_k\nffn_=Q6_K\nattn_.*=q4_K\nToken_Embd=Q8_0\n", "utf-8")
    out = tmp_path / "mine.gguf"
    ran = bitwright("quantize", "--model", made.model, "--layout", layout, "--out", out, "--json")
    assert ran.code == 0, ran.err
    types = {t.name.removeprefix("blk.0."): t.type for t in read_gguf(out).tensors}
    assert types["ffn_up.weight"] == types["attn_q.weight"] == "Q4_K"
    assert types["ffn_down.weight"] == "Q6_K"
    assert types["token_embd.weight"] == "Q8_0"
    assert types["attn_norm.weight"] == "F32"
    # The second rule also matches what the first has decided: told, as the precedence is.
    assert any("no effect" in note for note in ran.json["notes"])
    assert "no effect" in ran.err
    # Most of the body is Q4_K, and so the file says; not enough of it for the name Q4_K_S.
    assert ran.json["file_type"].startswith("Q4_K")
    assert read_gguf(out).kv["general.file_type"].value == FTYPES[ran.json["file_type"]]


def test_our_layout_is_what_llama_quantize_would_write_of_it(made: Made, tmp_path: Path):
    model = open_model(made.model)
    types = {t.name: t.type for t in read_gguf(made.gguf).tensors}
    names = upstream_layout(model, "Q4_K_M", has_imatrix=True)
    chosen = {n: types[n] for n in names if types[n] not in {"F32", "F16"}}
    theirs = tmp_path / "theirs.gguf"
    ftype = made.told["quantize"]["file_type"]
    upstream_quantize(model, theirs, ftype, read_imatrix(made.imatrix), chosen)
    assert theirs.read_bytes() == made.gguf.read_bytes()


def test_both_imatrix_formats_under_any_name_give_the_same_file(made: Made, tmp_path: Path):
    dat = tmp_path / "legacy.gguf.dat"
    merged = bitwright("imatrix", "--merge", made.imatrix, "--out", dat, "--json")
    assert merged.code == 0, merged.err
    assert dat.read_bytes()[:4] != b"GGUF"
    wrong_name = tmp_path / "really-old.gguf"
    shutil.copy(dat, wrong_name)
    outs = []
    for number, imatrix in enumerate((made.imatrix, dat, wrong_name)):
        out = tmp_path / f"{number}.gguf"
        ran = bitwright(
            *("quantize", "--model", made.model, "--layout", "Q4_K_S"),
            *("--imatrix", imatrix, "--out", out),
        )
        assert ran.code == 0, ran.err
        outs.append(out.read_bytes())
    assert outs[1] == outs[2]
    differing = np.frombuffer(outs[0], np.uint8) != np.frombuffer(outs[1], np.uint8)
    assert differing.mean() < 1e-3  # rounding of mean × chunks in the old format
    facts = bitwright("inspect", dat, "--json").json
    assert (facts["kind"], facts["counts_known"]) == ("imatrix", False)


def test_merge_by_shares_is_the_mean_of_means(made: Made, tmp_path: Path):
    first = read_imatrix(made.imatrix)
    other = tmp_path / "other=name.gguf"  # '=' in a name is no share
    shutil.copy(made.imatrix, other)
    out = tmp_path / "mix.gguf"
    ran = bitwright(
        *("imatrix", "--merge", f"{made.imatrix}=0.25", "--merge", f"{other}=0.75"),
        *("--out", out, "--json"),
    )
    assert ran.code == 0, ran.err
    mixed = read_imatrix(out)
    for name in first.entries:
        width = first.entries[name].sums.shape[1]
        np.testing.assert_allclose(
            mixed.importance(name, width), first.importance(name, width), rtol=1e-6
        )


def test_shards_in_and_out(made: Made, tmp_path: Path):
    shutil.copy(made.model, tmp_path / "big.gguf")
    shards = split_gguf(tmp_path / "big.gguf", 3)
    line = ("quantize", "--model", shards[1], "--layout", "Q4_K_M", "--imatrix", made.imatrix)
    ran = bitwright(*line, "--out", tmp_path / "one.gguf", "--json")
    assert ran.code == 0, ran.err
    whole = ("quantize", "--model", made.model, *line[3:], "--out", tmp_path / "whole.gguf")
    assert bitwright(*whole).code == 0
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    ran = bitwright(*line, "--out", tmp_path / "parts.gguf", "--keep-split", "--json")
    assert ran.code == 0, ran.err
    names = [Path(path).name for path in ran.json["paths"]]
    assert names == [f"parts-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert ran.json["size_bytes"] == sum(Path(p).stat().st_size for p in ran.json["paths"])
    facts = bitwright("inspect", ran.json["paths"][2], "--json").json
    assert facts["shards"] == 3
    assert facts["size_bytes"] == ran.json["size_bytes"]


def test_inspect_of_an_architecture_that_nobody_knows(tmp_path: Path):
    path = tiny_gguf(tmp_path / "new.gguf", arch="made_up_arch", n_layer=1)
    facts = bitwright("inspect", path, "--json").json
    assert facts["architecture"] == "made_up_arch"
    assert facts["types"]["F16"]["tensors"] == 8
    assert "made_up_arch" in bitwright("inspect", path).out


def test_inspect_agrees_with_another_reader(made: Made):
    reader = gguf.GGUFReader(str(made.gguf))
    facts = bitwright("inspect", made.gguf, "--json").json
    assert facts["weights"] == sum(int(t.n_elements) for t in reader.tensors)
    by_type: dict[str, int] = {}
    for tensor in reader.tensors:
        name = tensor.tensor_type.name
        by_type[name] = by_type.get(name, 0) + int(tensor.n_bytes)
    assert {name: entry["bytes"] for name, entry in facts["types"].items()} == by_type


def test_corpus_of_another_tokenizer_is_refused(made: Made, tmp_path: Path):
    other = tiny_gguf(tmp_path / "other.gguf", n_layer=1, n_vocab=300)
    line = ("--model", other, "--corpus", made.corpus)
    told = bitwright("imatrix", *line, "--out", tmp_path / "i.gguf").refusal()
    assert "another tokenizer" in told
    assert not (tmp_path / "i.gguf").exists()
    assert "another tokenizer" in bitwright("evaluate", made.gguf, *line).refusal()


def test_workflow_ls_and_cp(tmp_path: Path):
    listed = bitwright("workflow", "ls", "--json").json["workflows"]
    assert "coding-q3_k_s" in listed
    assert all(listed.values()), "a built-in workflow without a description"
    assert "coding-q3_k_s" in bitwright("workflow", "ls").out
    ran = bitwright("workflow", "cp", "coding-q3_k_s", tmp_path / "mine.toml", "--json")
    assert ran.json["path"] == str(tmp_path / "mine.toml")
    assert 'target = "code"' in (tmp_path / "mine.toml").read_text(encoding="utf-8")
    assert bitwright("workflow", "cp", "coding-q3_k_s", tmp_path).code == 0
    assert "exists already" in bitwright("workflow", "cp", "coding-q3_k_s", tmp_path).refusal()
    assert "coding-q3_k_s" in bitwright("workflow", "cp", "nothing", tmp_path).refusal()


def test_a_folder_that_a_run_is_using_is_refused(finished: Finished, tmp_path: Path):
    folder = RunFolder.open(tmp_path / "run")
    with folder.locked():
        ran = bitwright("run", finished.workflow, "--model", finished.model, "--out", folder.path)
        assert ran.code == 1
        assert "is in use by another run: wait for it" in ran.err
    with folder.locked():  # the lock went with the block
        pass


def test_the_card_gives_the_command_with_what_was_changed(finished: Finished, tmp_path: Path):
    spec, name = load_workflow("coding-q3_k_s")
    model, folder = open_model(finished.model), RunFolder(tmp_path)

    def command(choices: RunChoices) -> str:
        given = overridden(spec, choices)
        return command_of(
            RunContext(given, name, model, folder, SessionOptions(), Silent()), "demo"
        )

    assert command(RunChoices()) == "bitwright run coding-q3_k_s --model demo"
    changed = RunChoices(budget="5 GiB", seed=3, prices={"chat": 0.05}, n_ctx=256, no_measure=True)
    assert command(changed) == (
        "bitwright run coding-q3_k_s --model demo --budget '5 GiB' --seed 3 --price chat=0.05"
        " --ctx 256 --no-measure"
    )
    own = RunContext(spec, "mine", model, folder, SessionOptions(), Silent())
    assert command_of(own, "m.gguf") == "bitwright run mine.toml --model m.gguf"

"""The imatrix's mix chosen by data: only beyond the noise, only within the prices, said aloud."""

import html
import json
from pathlib import Path

import numpy as np
import pytest

from bitwright.corpora.store import load_corpus
from bitwright.engine.imatrix_file import read_imatrix
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.session import SessionOptions
from bitwright.eval.divergence import ScoreTable
from bitwright.eval.suite import load_suite
from bitwright.workflows import pipeline, stage_allocate, stage_imatrix
from bitwright.workflows.context import RunContext
from bitwright.workflows.joint_meter import Joint, JointMeter
from bitwright.workflows.progress import Silent
from bitwright.workflows.run_folder import NotDone, RunFolder
from bitwright.workflows.spec import load_workflow
from bitwright.workflows.stage_imatrix import collect_imatrices
from bitwright.workflows.stage_mix import mix_sentence, pick
from tests.eval.synthetic import table
from tests.workflows.conftest import Finished
from tests.workflows.support import bitwright

DOCUMENTS, ROWS = 12, 40


def scores(**factors: float) -> ScoreTable:
    """Mixes whose KLD on code is that many times the first one's, document by document."""
    rng = np.random.default_rng(0)
    document = np.repeat(np.arange(DOCUMENTS), ROWS)
    base = rng.lognormal(-3, 0.5, len(document))
    noise = {name: rng.normal(1, 0.02, len(document)) for name in factors}
    tables = {
        (name, "code"): table(base * factor * noise[name], document, label=name)
        for name, factor in factors.items()
    }
    documents = next(iter(tables.values())).documents
    assert len(documents) == DOCUMENTS
    return ScoreTable(tuple(factors), ("code",), tables)


def picked(broken: dict[str, dict[str, float]] | None = None, **factors: float) -> str:
    known = {name: (broken or {}).get(name, {}) for name in factors}
    return pick(scores(**factors), tuple(factors), known, "code", load_suite("divergence"))[0]


def test_a_mix_is_taken_only_when_it_is_shown_to_be_better() -> None:
    assert picked(task=1.0, general=1.2, pure=1.1) == "task"
    assert picked(task=1.0, general=1.2, pure=0.8) == "pure"
    assert picked(task=1.0, general=0.9, pure=0.8) == "pure"
    assert picked(task=1.0, general=0.9999, pure=1.0) == "task"


def test_a_mix_that_breaks_a_price_elsewhere_is_not_taken() -> None:
    assert picked({"pure": {"math": 1.3}}, task=1.0, general=1.2, pure=0.8) == "task"
    assert picked({"pure": {"math": 1.3}}, task=1.0, general=0.9, pure=0.8) == "general"


def test_the_sentence_names_the_mix_and_its_gain() -> None:
    mixes = {"task": {"code": 0.7, "general": 0.3}, "100 % code": {"code": 1.0}}
    ratios = {"100 % code": {"over": "task", "value": 0.9, "low": 0.85, "high": 0.95}}
    better = mix_sentence(mixes, "100 % code", "code", ratios)
    assert "100 % code was better on code: ×0.900 [0.850, 0.950]" in better
    assert better.endswith("of the KLD with 70 % code + 30 % general")
    assert "than the declared 70 % code + 30 % general" in mix_sentence(mixes, "task", "code", {})


@pytest.fixture(scope="module")
def mixed(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = finished.workflow.read_text()
    line = next(one for one in text.splitlines() if one.startswith("task = "))
    more = f"{line}\ncandidates = [{{ code = 1.0 }}, {{ general = 1.0 }}]"
    path = finished.workflow.with_name("mixed.toml")
    path.write_text(text.replace(line, more))
    return path


def test_a_run_with_candidates_goes_on_with_the_chosen_one(
    finished: Finished, mixed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ran = bitwright("run", mixed, "--model", finished.model, "--out", folder, "--json")
    assert ran.code == 0, ran.err
    record = ran.json["imatrix_mix"]
    assert set(record["measured"]) == {"task", "general", "100 % code"}
    assert record["chosen"] in record["measured"]
    name = {"task": "task", "general": "general", "100 % code": "category-code"}[record["chosen"]]
    chosen = read_imatrix(folder / "imatrix" / "chosen.gguf")
    assert chosen.sha256() == read_imatrix(folder / "imatrix" / f"{name}.gguf").sha256()
    assert record["sentence"] in html.unescape((folder / "report.html").read_text())
    again = bitwright("run", mixed, "--model", finished.model, "--out", folder, "--json")
    assert again.json == ran.json
    plan = bitwright(
        "run", mixed, "--model", finished.model, "--out", folder, "--dry-run", "--json"
    )
    assert "mix" in plan.json["stages_with_results"]


def test_an_unknown_category_in_a_candidate_is_named(finished: Finished, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    text = finished.workflow.read_text()
    line = next(one for one in text.splitlines() if one.startswith("task = "))
    path.write_text(text.replace(line, f"{line}\ncandidates = [{{ poetry = 1.0 }}]"))
    ran = bitwright("run", path, "--model", finished.model, "--out", tmp_path / "run")
    assert ran.code == 1
    assert "imatrix.candidates.0 names the category 'poetry'" in ran.err


def test_the_imatrix_of_a_studys_choice_is_used_reported_and_kept(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "studied.toml", tmp_path / "run"
    study = "[study]\ntrials = 8\nimatrix_shares = [0.0]\n"
    path.write_text(finished.workflow.read_text() + study)
    # Which mix is better on a random model is chance: here the other one is.
    real = JointMeter.measure

    def measure(self, types, category, stop=None, imatrix=None):  # type: ignore[no-untyped-def]
        found = real(self, types, category, None, imatrix)
        return Joint(found.kld * (0.5 if imatrix == "mix-0" else 1.0), found.tokens)

    monkeypatch.setattr(JointMeter, "measure", measure)
    monkeypatch.setattr(stage_allocate, "choose_best", lambda *_: "study")
    monkeypatch.setattr(stage_allocate, "reason_to_keep_stock", lambda *_: "")
    monkeypatch.setattr(pipeline, "decide", lambda _p, _s, _a, compared: (compared.label, "better"))
    arguments = ("run", path, "--model", finished.model, "--out", folder, "--json")
    ran = bitwright(*arguments)
    assert ran.code == 0, ran.err
    assert ran.json["chosen"] == "ours-mix-0"
    assert ran.json["baseline"] == "stock-Q3_K_S-task"
    files = {entry["label"]: entry for entry in ran.json["files"]}
    assert files["stock-Q3_K_S-mix-0"]["imatrix"] == files["ours-mix-0"]["imatrix"] == "mix-0"
    assert {"ours-task", "ours-general", "stock-Q3_K_S-general"} < files.keys()
    record = ran.json["study_mix"]
    kept = read_imatrix(folder / record["file"])
    general = read_imatrix(folder / "imatrix" / "category-general.gguf")
    assert kept.sha256() == general.sha256()
    klds = {n: f["scores"]["code"]["kld_nats"] for n, f in files.items()}
    over = record["over_task"]["ours"]["value"]
    assert over == pytest.approx(klds["ours-mix-0"] / klds["ours-task"])
    # The general imatrix is this mix: its files measure the same.
    assert klds["ours-mix-0"] == klds["ours-general"] != klds["ours-task"]
    assert "100 % general" in record["sentence"]
    assert record["sentence"] in html.unescape((folder / "report.html").read_text())
    # The choice was scored with it too: as the search measured it, but for the half above.
    select = json.loads((folder / "select.json").read_text())["result"]
    (studied,) = [one for one in select["search"]["measured"] if one["label"] == "study"]
    assert select["measured"]["study"]["code"] == pytest.approx(2 * studied["nats"], rel=1e-6)
    # What was written is packed with it: the run compared its logits with the layout's; and by hand
    written = open_model(Path(files["ours-mix-0"]["path"]), allow_requantize=True)
    packer = Packer(open_model(finished.model), kept)
    name = next(t.name for t in written.tensors if t.type in ("Q2_K", "Q3_K", "Q4_K"))
    assert (np.array(written.raw(name)) == packer.pack(name, written.tensor(name).type)).all()
    again = bitwright(*arguments)
    assert again.json == ran.json


def test_an_imatrix_of_an_earlier_version_is_collected_anew(
    finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, name = load_workflow(finished.workflow)
    options = SessionOptions(threads=1, n_ctx=spec.engine.n_ctx, working_type="file")
    folder = RunFolder(finished.folder, read_only=True)
    ctx = RunContext(spec, name, open_model(finished.model), folder, options, Silent())
    corpora = load_corpus(finished.folder / "corpus")
    known, _ = collect_imatrices(ctx, corpora)
    assert "token_embd.weight" in known["task"].entries
    monkeypatch.setattr(stage_imatrix, "IMATRIX_VERSION", 1)
    with pytest.raises(NotDone):
        collect_imatrices(ctx, corpora)

"""Priors: built from maps, read back, refused where they do not belong."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from bitwright.allocator.options import build_options
from bitwright.allocator.priors import (
    Source,
    build_prior,
    class_of,
    find_prior,
    prior_map,
    prior_table,
    rank_correlation,
    read_prior,
    write_prior,
)
from bitwright.content import content_dir
from bitwright.engine.model_file import open_model
from bitwright.errors import ConfigError, InputError
from tests.allocator.tables import CATEGORIES, table
from tests.tiny import tiny_gguf

LADDER = ("Q2_K", "Q3_K", "Q4_K", "Q6_K")


def made(path, seed=0, **shape):
    model = open_model(tiny_gguf(path, **shape))
    options = build_options(model, ladder=LADDER)
    return Source(model, table(options, seed), f"{model.name}, synthetic"), options


@pytest.fixture
def source(tmp_path):
    return made(tmp_path / "a-F16.gguf", n_layer=5)  # depths on the grid of priors


def test_a_prior_gives_back_the_map_it_is_of(source):
    one, options = source
    prior = build_prior([one])
    found = prior_table(prior, options)
    assert prior.spread < 1e-3
    value, n = rank_correlation(prior, one, "code")
    assert n == len(options.tensors)
    assert value > 0.95
    y = found.types.index("Q4_K") - found.types.index("Q2_K")
    np.testing.assert_allclose(
        found.nats[:, y] / found.nats[:, 0], one.table.nats[:, y] / one.table.nats[:, 0], rtol=1e-3
    )
    assert not found.measured.any()
    assert (found.se[~np.isnan(found.se)] > 0).all()


def test_a_prior_serves_a_model_of_another_depth(source, tmp_path):
    prior = build_prior([source[0]])
    _, options = made(tmp_path / "b-F16.gguf", seed=1, n_layer=3)
    found = prior_table(prior, options)
    assert not np.isnan(found.nats[:, found.types.index("Q3_K")]).any()


def test_the_file_round_trips(source, tmp_path):
    prior = build_prior([source[0]])
    write_prior(prior, tmp_path / "p.json")
    assert read_prior(tmp_path / "p.json") == prior
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(InputError, match="prior build"):
        read_prior(tmp_path / "p.json")
    with pytest.raises(InputError):
        read_prior(tmp_path / "absent.json")


def test_other_classes_are_refused(source, tmp_path):
    prior = build_prior([source[0]])
    other, options = made(tmp_path / "u-F16.gguf", tied=False)
    assert class_of(source[0].model) == "llama-dense-tied"
    assert class_of(other.model) == "llama-dense-untied"
    with pytest.raises(ConfigError, match="llama-dense-untied"):
        prior_table(prior, options)
    with pytest.raises(ConfigError, match="do not carry over"):
        rank_correlation(prior, other, "code")
    with pytest.raises(InputError, match="one architecture class"):
        build_prior([source[0], other])
    with pytest.raises(ConfigError, match="poetry"):
        rank_correlation(prior, source[0], "poetry")


def test_embeddings_follow_their_share_of_the_file(source, tmp_path):
    one, options = source
    prior = build_prior([one])
    half = replace(prior, head_share={k: v * 2 for k, v in prior.head_share.items()})
    t = options.tensors.index("token_embd.weight")
    ratio = prior_table(half, options).nats[t, 0] / prior_table(prior, options).nats[t, 0]
    np.testing.assert_allclose(ratio, 0.5)


def test_shipped_priors_are_whole_and_of_their_class():
    paths = sorted((content_dir("allocator") / "priors").glob("*.json"))
    assert paths
    for path in paths:
        prior = read_prior(path)
        assert prior.model_class == path.stem
        assert prior.sources
        assert "/" not in json.dumps(prior.sources)
        assert all(math.isfinite(v) for r in prior.sensitivity.values() for c in r.values()
                   for v in c)  # fmt: skip
    assert find_prior(open_model("demo")) is not None
    assert set(find_prior(open_model("demo")).sensitivity) > set(CATEGORIES)


def test_a_prior_stands_in_for_a_map_and_says_so(source):
    one, options = source
    prior = build_prior([one])
    found = prior_map(prior, one.model, options.tensors, "code")
    assert found.tensors == options.tensors
    assert found.categories == tuple(prior.sensitivity)
    assert set(found.rows["n_tokens"]) == {0}
    assert "not measured on this model" in found.notes[0]
    priced = prior_table(prior, options)
    y, c = priced.types.index("Q2_K"), priced.categories.index("code")
    rows = found.rows[found.rows["category"] == "code"].set_index("tensor")["kld_nats"]
    np.testing.assert_allclose([rows[n] for n in priced.tensors], priced.nats[:, y, c])
    with pytest.raises(ConfigError, match="not the target 'poetry'"):
        prior_map(prior, one.model, options.tensors, "poetry")


def test_a_prior_in_place_of_a_map_scales_to_the_type_that_rows_take(tmp_path, source):
    prior = build_prior([source[0]])
    model = open_model(tiny_gguf(tmp_path / "odd-F16.gguf", n_embd=192, n_head=3, n_kv=1, n_ff=320))
    options = build_options(model, ladder=LADDER)
    found = prior_map(prior, model, options.tensors, "code").rows
    assert set(found["type"]) == {"Q4_0"}  # for Q2_K, as llama.cpp has it
    priced = prior_table(prior, options)
    y, c = priced.types.index("Q4_0"), priced.categories.index("code")
    rows = found[found["category"] == "code"].set_index("tensor")["kld_nats"]
    np.testing.assert_allclose([rows[n] for n in priced.tensors], priced.nats[:, y, c])

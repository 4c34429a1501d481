"""Sources: rows, files, folders and data sets, and what is refused about them."""

import gzip
import json
import pickle
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bitwright.corpora.recipe import parse_recipe
from bitwright.corpora.sources.files import split_text
from bitwright.corpora.sources.folder import content_reason
from bitwright.corpora.sources.opening import open_source
from bitwright.corpora.sources.rows import json_type, openai_tool
from bitwright.errors import BitwrightError, ConfigError, InputError


def documents(folder: Path, keys: str, skipped: Counter[str] | None = None):
    text = f'category = "chat"\n[[sources]]\n{keys}\n'
    recipe = parse_recipe(text, name="r.toml", folder=folder)
    rng = np.random.default_rng(0)
    counter = Counter() if skipped is None else skipped
    found = list(open_source(recipe.sources[0], recipe, rng, counter))
    return sorted(found, key=lambda d: [len(d.id), d.id])


def write_jsonl(path: Path, rows: list[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


ROWS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"text": "plain \ud83d text"},
    {
        "query": "rain?",
        "tools": [
            {
                "api_name": "rain",
                "api_description": "Looks out",
                "parameters": {"town": {"type": "str, optional"}, "days": "int"},
                "required": ["town"],
            }
        ],
        "calls": [{"name": "rain", "arguments": {"town": "Oslo"}}],
    },
    {"query": "nothing fits", "tools": [], "calls": []},
]


def test_three_kinds_of_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", ROWS)
    skipped: Counter[str] = Counter()
    chat, text, call = documents(tmp_path, 'kind = "jsonl"\npath = "d.jsonl"', skipped)
    assert [d.id for d in (chat, text, call)] == ["d.jsonl:1", "d.jsonl:2", "d.jsonl:3"]
    assert chat.messages[1] == {"role": "assistant", "content": "b"}
    assert text.text == "plain \ufffd text"
    assert call.messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "rain", "arguments": {"town": "Oslo"}}}
    ]
    assert call.tools[0]["function"] == {
        "name": "rain",
        "description": "Looks out",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["town"],
        },
    }
    assert skipped == {"nothing to score": 1}


def test_fields_and_roles_are_mapped(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "d.jsonl",
        [{"talk": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
    )
    fields = (
        'fields = { messages = "talk", role = "from", content = "value", '
        'roles = { human = "user", gpt = "assistant" } }'
    )
    (document,) = documents(tmp_path, f'kind = "jsonl"\npath = "d.jsonl"\n{fields}')
    assert [m["role"] for m in document.messages] == ["user", "assistant"]


def test_arguments_and_tools_stored_as_json_text(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": json.dumps([{"name": "f", "parameters": {}}]),
    }
    write_jsonl(tmp_path / "d.jsonl", [row])
    (document,) = documents(tmp_path, 'kind = "jsonl"\npath = "d.jsonl"')
    assert document.messages[0]["content"] == "hi"
    assert document.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert document.tools[0]["function"]["name"] == "f"


def test_a_full_openai_tool_stays_as_it_is() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "enum": ["a"]}},
            },
        },
    }
    assert openai_tool(tool, "here") == tool
    assert [json_type(t) for t in ("List[int]", "Dict", "custom")] == ["array", "object", "custom"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": 1', "line 2 is not JSON"),
        ("[1]", "line 2 is a JSON list"),
        ('{"prompt": "x"}', "d.jsonl:2 has the keys prompt"),
        ('{"messages": "no"}', "not JSON"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "'robot' is unknown"),
        ('{"text": 3}', "text must be text"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_rows_are_refused_with_their_line(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        documents(tmp_path, 'kind = "jsonl"\npath = "d.jsonl"')
    assert said in str(caught.value)


def test_gzip_parquet_and_globs_are_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"text": "from gzip"}\n')
    write_jsonl(tmp_path / "a.jsonl", [{"text": "from a"}])
    pq.write_table(pa.table({"text": ["from parquet"]}), tmp_path / "c.parquet")
    found = documents(tmp_path, 'kind = "jsonl"\npath = "[ab].jsonl*"')
    assert {d.text for d in found} == {"from gzip", "from a"}
    assert documents(tmp_path, 'kind = "jsonl"\npath = "c.parquet"')[0].text == "from parquet"
    data = (tmp_path / "c.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(data[:20] + b"\xff" * 40 + data[60:])
    with pytest.raises(InputError, match="Parquet"):
        documents(tmp_path, 'kind = "jsonl"\npath = "c.parquet"')


def test_a_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "d.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(24):
            file.write(b'{"text": "' + b"a" * (1 << 20) + b'"}\n')
    with pytest.raises(InputError, match="beyond its limit"):
        documents(tmp_path, 'kind = "jsonl"\npath = "d.jsonl.gz"')
    (tmp_path / "e.jsonl.gz").write_bytes((tmp_path / "d.jsonl.gz").read_bytes()[:200])
    with pytest.raises(InputError, match="damaged gzip"):
        documents(tmp_path, 'kind = "jsonl"\npath = "e.jsonl.gz"')


def test_pickles_archives_and_scripts_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(pickle.dumps([1]))
    with zipfile.ZipFile(tmp_path / "b.jsonl", "w") as archive:
        archive.writestr("../x", "{}")
    (tmp_path / "c.py").write_text("print(1)")
    for name in ("a.jsonl", "b.jsonl", "c.py"):
        with pytest.raises(InputError, match=name):
            documents(tmp_path, f'kind = "jsonl"\npath = "{name}"')
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "c.py"]


def test_one_endless_line_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "d.jsonl").open("wb") as file:
        file.write(b'{"text": "fine"}\n')
        file.truncate(1 << 30)  # sparse: reading must stop long before its end
    with pytest.raises(InputError, match="line 2 is longer"):
        documents(tmp_path, 'kind = "jsonl"\npath = "d.jsonl"')


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"good\n\ncaf\xe9", "byte 9 is 0xe9"),
        ("text\n".encode("utf-16"), "byte 0 is 0xff"),
        (b"good \0 bad", "NUL byte at byte 5"),
    ],
)
def test_text_must_be_utf8_without_nul(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "t.txt").write_bytes(data)
    with pytest.raises(InputError) as caught:
        documents(tmp_path, 'kind = "text"\npath = "t.txt"')
    assert said in str(caught.value)


def test_text_is_cut_at_blank_lines_or_separators(tmp_path: Path) -> None:
    assert list(split_text("a\nb\n\n \n\nc\n", None, 0)) == ["a\nb\n", "c\n"]
    assert list(split_text("a\n\nb\n\nc", None, 2)) == ["a\n\nb\n", "c\n"]
    assert list(split_text("a---b---", "---", 0)) == ["a\n", "b\n"]
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo")
    found = documents(tmp_path, 'kind = "text"\npath = "t.txt"\nmin_chars = 0')
    assert [d.text for d in found] == ["one\n", "two\n"]


def test_max_documents(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"text": f"number {i}"} for i in range(9)])
    keys = 'kind = "jsonl"\npath = "d.jsonl"\nmax_documents = 3'
    assert [d.text for d in documents(tmp_path, keys)] == ["number 0", "number 1", "number 2"]


def make_repository(root: Path) -> None:
    code = "def f(x):\n    return x + 1\n" * 10
    for name in (
        *("a.py", "pkg/b.py", "pkg/skip.py", "pkg/keep.py", "logs/c.py", "deep/er/d.py"),
        *("node_modules/e.py", ".venv/f.py", "api_pb2.py", "notes.md", "out/g.py"),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code + f"# {name}\n")
    (root / ".gitignore").write_text("/logs/\nskip.py\nkeep.py\nout\n")
    (root / "pkg/.gitignore").write_text("!keep.py\n")
    (root / "min.py").write_text("x=1;" * 600)
    (root / "made.py").write_text("# Code generated by a tool. DO NOT EDIT.\n" + code)
    (root / "bin.py").write_bytes(b"\0\xff" * 200)
    (root / "big.py").write_text(code * 1200)
    (root / "tiny.py").write_text("x = 1\n")
    (root / "link.py").symlink_to(root / "a.py")


def test_folder_takes_what_people_wrote(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    make_repository(root)
    skipped: Counter[str] = Counter()
    found = documents(tmp_path, 'kind = "folder"\npath = "repo"', skipped)
    assert {d.id for d in found} == {
        *("repo/a.py", "repo/pkg/b.py", "repo/pkg/keep.py", "repo/deep/er/d.py")
    }
    assert skipped == {
        "ignored by git": 1,
        "generated": 2,
        "minified": 1,
        "binary": 1,
        "too large": 1,
        "too short": 1,
        "a link": 1,
    }


def test_folder_patterns(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    make_repository(root)
    keys = 'kind = "folder"\npath = "repo"\ninclude = ["*.md", "pkg/*.py"]\nexclude = ["b.py"]'
    ids = {d.id for d in documents(tmp_path, keys)}
    assert ids == {"repo/notes.md", "repo/pkg/keep.py"}
    with pytest.raises(ConfigError, match=r"\*\.rs"):
        documents(tmp_path, 'kind = "folder"\npath = "repo"\ninclude = ["*.rs"]')
    with pytest.raises(ConfigError, match="not a folder"):
        documents(tmp_path, 'kind = "folder"\npath = "nowhere"')


def test_content_reasons() -> None:
    assert content_reason("short", 10) == "too short"
    assert content_reason("x = 1\n" * 50, 10) is None


HUB = 'kind = "hub"\nid = "{}"\nconfig = "default"\nsplit = "{}"\nrevision = "main"'


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_data_sets_are_streamed_and_scripts_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ds"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"text": f"row {i}"} for i in range(5)])
    found = documents(tmp_path, HUB.format("./ds", "train") + "\nmax_documents = 2")
    assert [(d.id, d.text) for d in found] == [("ds:1", "row 0"), ("ds:2", "row 1")]
    with pytest.raises(InputError, match="nope"):
        documents(tmp_path, HUB.format("./ds", "nope"))
    script = tmp_path / "scripted"
    script.mkdir()
    (script / "scripted.py").write_text("raise SystemExit\n")
    with pytest.raises(InputError, match="scripts"):
        documents(tmp_path, HUB.format("./scripted", "train"))


def test_offline_mode_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        documents(tmp_path, HUB.format("someone/something", "train"))


def test_missing_files_say_where_paths_start(tmp_path: Path) -> None:
    for kind in ("jsonl", "text"):
        with pytest.raises(BitwrightError, match="recipe's folder"):
            documents(tmp_path, f'kind = "{kind}"\npath = "none.txt"')

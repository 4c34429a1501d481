"""What the benchmarks over a run folder share: their options, and the context they work in."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitwright.engine.model_file import open_model
from bitwright.engine.session import SessionOptions
from bitwright.workflows.context import RunContext
from bitwright.workflows.output import Output
from bitwright.workflows.run_folder import RunFolder
from bitwright.workflows.spec import WorkflowSpec


def options(about: str | None) -> argparse.ArgumentParser:
    """A parser with a model, a workflow and where to work; ``about``: the module's docstring."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0] if about else "")
    parser.add_argument("model")
    parser.add_argument("--workflow", default="coding-q3_k_s")
    parser.add_argument("--json", action="store_true", help="one JSON line on stdout")
    parser.add_argument("--out", type=Path, help="run folder to keep and to go on in")
    parser.add_argument("--threads", type=int, default=0)
    return parser


@contextmanager
def context(args: argparse.Namespace, spec: WorkflowSpec, name: str) -> Iterator[RunContext]:
    """The run that the options ask for, in a folder that is gone afterwards without --out."""
    model = open_model(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.open(args.out or Path(scratch) / "run")
        session = SessionOptions(
            threads=args.threads, n_ctx=spec.engine.n_ctx, working_type=spec.engine.working_type
        )
        reporter = Output(json=True, quiet=False).reporter()
        try:
            yield RunContext(spec, name, model, folder, session, reporter)
        finally:
            reporter.close()

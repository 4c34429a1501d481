"""The command and its groups; the verbs register themselves in build.py and scores.py."""

from typing import Annotated

import typer

from bitwright import __version__

app = typer.Typer(
    name="bitwright",
    help="Give it a full-precision GGUF, a task and a size: it gives back the GGUF of that size "
    "that is best at the task, and says what the gain costs elsewhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
workflow_app = typer.Typer(help="List and copy the built-in workflows.", no_args_is_help=True)
app.add_typer(workflow_app, name="workflow")
prior_app = typer.Typer(help="Priors: what other models' maps say.", no_args_is_help=True)
app.add_typer(prior_app, name="prior")
eval_app = typer.Typer(help="What evaluation needs.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and stop", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None: ...

"""What every stage of a run is given."""

from dataclasses import dataclass

from bitwright.engine.model_file import ModelFile
from bitwright.engine.session import SessionOptions
from bitwright.engine.working_type import resolve_working_type
from bitwright.workflows.progress import Reporter
from bitwright.workflows.run_folder import RunFolder, versions
from bitwright.workflows.spec import WorkflowSpec


@dataclass(frozen=True, slots=True)
class RunContext:
    """One run: the checked workflow, the model, the folder and how to compute."""

    spec: WorkflowSpec
    name: str
    model: ModelFile
    folder: RunFolder
    options: SessionOptions
    reporter: Reporter
    keep_split: bool = False

    @property
    def categories(self) -> tuple[str, ...]:
        """Target first, then the others in the workflow's order."""
        target = self.spec.target
        return (target, *(c for c in self.spec.corpora if c != target))

    def engine_key(self) -> dict[str, object]:
        """What of the engine can change a result.

        Threads are left out: llama.cpp's results are identical across thread counts here.
        """
        return {
            "llama-cpp-python": versions()["llama-cpp-python"],
            "n_ctx": self.options.n_ctx,
            "gpu_layers": self.options.gpu_layers,
            "working_type": resolve_working_type(
                self.options.working_type, self.model.reference_type, self.options.gpu_layers
            ),
            "flash_attn": self.options.flash_attn,
        }

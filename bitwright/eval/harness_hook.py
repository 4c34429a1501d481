"""Makes `lm_eval --model bitwright` work without importing anything.

lm-eval has no plug-in entry point. `bitwright_lm_eval.pth` in site-packages imports this module,
which waits for `lm_eval.models` to be imported and then adds one lazy entry to its registry. It
costs nothing in programs that do not use lm-eval.
"""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULE = "lm_eval.models"
TARGET = "bitwright.eval.harness:BitwrightLM"


class _Loader(Loader):
    """lm-eval's own loader, and our entry after it."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then register."""
        self._own.exec_module(module)
        from lm_eval.api.registry import (  # type: ignore[import-untyped]
            model_registry,
        )

        if "bitwright" not in model_registry:
            model_registry.register("bitwright", target=TARGET)


class _Finder(MetaPathFinder):
    """Answers for one module, once."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec with our loader around its own."""
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Wait for lm_eval.models; a second call does nothing."""
    if MODULE not in sys.modules and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())

"""A tool of `tools/` as a module, so that a test can call its functions in its own process."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_tool(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module

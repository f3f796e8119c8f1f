"""Where in the code something is allocated: the line, and what the statement there calls its result.

    def backward(...):                                    # decoder_layer.py
        dxn_Td = torch.zeros_like(g_Td)                   # line_of: "decoder_layer.py:2", result_name: "dxn"
        outputs.put(stage, all_to_all(o_XnD))             # result_name: "outputs.put"
        return g_Td + 1                                   # result_name: ""

Shape suffixes are left out. Sources are read once a file, so that code which allocates needs no bookkeeping of its own.
"""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parents[1])
COUNTING = (__file__, str(Path(__file__).with_name("counting.py")))
SHAPE_SUFFIX = re.compile(r"_[CTSKHDGFVXLcdhmnotirg]+2?$")  # design letters, as in q_SHD or w_od


def package_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of this package from `frame` outward, without those that count."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and file not in COUNTING:
            yield frame
        frame = frame.f_back


def line_of(frame: FrameType) -> str:
    """`file.py:line` of the innermost frame of this package, or else of the innermost outside torch."""
    found = next(package_frames(frame), None)
    while found is None and frame is not None:
        file = frame.f_code.co_filename
        found = frame if "/torch/" not in file and file not in COUNTING else None
        frame = frame.f_back
    return "torch" if found is None else f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"


def result_name(frame: FrameType) -> str:
    """What the statement that `frame` is at assigns, or the function that it calls for its effect; "" for other statements."""
    return _results(frame.f_code.co_filename).get(frame.f_lineno, "")


@lru_cache
def _results(file: str) -> dict[int, str]:
    """The result's name of each line of a file. Statements inside others are walked after these, and overwrite their lines."""
    names: dict[int, str] = {}
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt):
            names |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), _result(node))
    return names


def _result(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Assign):
        return _target(statement.targets[0])
    if isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For)):
        return _target(statement.target)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func)
    return ""


def _target(node: ast.expr) -> str:
    """`dk_SmD, dv_SmD` is "dk, dv"; `self.dxn_Td` is "dxn"; `sums[stage]` is "sums"."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return ", ".join(map(_target, node.elts))
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return _target(node.value)
    return SHAPE_SUFFIX.sub("", node.attr if isinstance(node, ast.Attribute) else ast.unparse(node))

"""A corpus that every machine with Python has: the sources of the interpreter's own standard library, one document a file.

    python tools/build_stdlib_corpus.py --output data/stdlib.jsonl

writes JSON lines, sorted by name: {"name": "abc.py", "text": "..."}. Python 3.11 gives 734 documents, 12.1 MB; the longest,
pydoc_data/topics.py, has 0.7 MB. Installed packages are left out, and the tests too unless --include-tests.
"""

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {"site-packages", "dist-packages", "__pycache__"}
TESTS = {"test", "tests", "idle_test"}


def source_files(library: Path, include_tests: bool) -> Iterator[Path]:
    """The .py files of the library, sorted by their path in it."""
    left_out = PACKAGES if include_tests else PACKAGES | TESTS
    inside = sorted((path.relative_to(library) for path in library.rglob("*.py")), key=Path.as_posix)
    return (library / path for path in inside if not left_out.intersection(path.parts[:-1]) and (library / path).is_file())


def build(library: Path, output: Path, include_tests: bool) -> tuple[int, int, list[str]]:
    """Write the corpus, complete or not at all. Returns (documents, bytes of text, names of the files that are not UTF-8)."""
    documents = text_bytes = 0
    undecodable = []
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as lines:
            for path in source_files(library, include_tests):
                name, data = path.relative_to(library).as_posix(), path.read_bytes()
                try:
                    text = data.decode("utf-8")
                except UnicodeDecodeError:  # old tests in other encodings
                    undecodable.append(name)
                    continue
                lines.write(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
                documents += 1
                text_bytes += len(data)
        if documents:
            os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return documents, text_bytes, undecodable


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--include-tests", action="store_true", help="the library's own tests too: twice the text")
    args = parser.parse_args(argv)
    library = Path(sysconfig.get_path("stdlib"))
    documents, text_bytes, undecodable = build(library, args.output, args.include_tests)
    if undecodable:
        print(f"{len(undecodable)} files that are not UTF-8 left out: {', '.join(undecodable)}")
    if not documents:
        sys.exit(f"build_stdlib_corpus: no .py file in {library}; this Python comes without its sources")
    print(f"wrote {args.output}: {documents} documents, {text_bytes / 1e6:.1f} MB, from {library}")


if __name__ == "__main__":
    main()

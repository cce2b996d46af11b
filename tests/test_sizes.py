"""The report of sizes that `scripts/test` prints."""

from __future__ import annotations

from pathlib import Path

import sizes


def test_report_names_and_counts_what_exceeds_a_number(tmp_path: Path) -> None:
    fields = "\n".join(f"        self.f{i} = {i}" for i in range(sizes.CLASS_FIELDS))
    long = "\n".join("    x = 1" for _ in range(sizes.FUNCTION_LINES))
    text = f'"""Doc."""\n# a comment\n\nclass A:\n    g: int\n    def __init__(self):\n{fields}\n\ndef f():\n{long}\n'
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text("x = (\n    1,\n)\n" * (sizes.FILE_LINES // 3 + 1))
    num_lines = text.count("\n") + 402
    assert sizes.report(tmp_path).splitlines() == [
        f"{tmp_path.name}: 2 files, {num_lines} lines, {num_lines - 4} of code",
        "files of more than 400 lines: 1 of 2",
        "    402 b.py",
        "functions of more than 50 lines: 1 of 2",
        "     51 a.py:20 f",
        "classes of more than 12 fields: 1 of 1",
        "     13 a.py:4 A",
    ]

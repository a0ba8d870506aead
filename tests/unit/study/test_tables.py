"""Tables as files: characters that mean something in LaTeX or CSV are texts there."""

from __future__ import annotations

import csv
import io

from lookonce.study.figures import Table

HOSTILE = r'a_b & 50% \cmd{x} ~^ #1 $ <b> "q", c'


def test_texts_stay_texts_in_latex_and_csv():
    table = Table("t", "A_b", "5 %", ("variant", "%"), [(HOSTILE, "1")], [{"arm": HOSTILE, "share": 0.1}])
    latex = table.to_latex()
    assert r"a\_b \& 50\% \textbackslash{}cmd\{x\} \textasciitilde{}\textasciicircum{} \#1 \$ \textless{}b" in latex
    assert "\\begin{tabular}{lr}\n\\toprule\nvariant & \\% \\\\\n\\midrule\n" in latex
    assert "\\caption{A\\_b. 5 \\%}\n\\label{tab:t}\n" in latex and latex.endswith("\\end{tabular}\n\\end{table}\n")
    assert list(csv.reader(io.StringIO(table.to_csv()))) == [["arm", "share"], [HOSTILE, "0.1"]]


LINES = [("=1+1", -0.5), ("-a", None), ("-5", 3)]


def test_a_spreadsheet_runs_no_cell_and_numbers_stay_numbers():
    table = Table("t", "", "", ("variant",), [], [dict(zip(("@arm", "points"), line, strict=True)) for line in LINES])
    expected = [["'@arm", "points"], ["'=1+1", "-0.5"], ["'-a", ""], ["-5", "3"]]
    assert list(csv.reader(io.StringIO(table.to_csv()))) == expected

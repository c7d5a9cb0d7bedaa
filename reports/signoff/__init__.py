"""The sign-off: may the candidate be switched on? Takes the parts of one run directory and judges them together.

result.py      the document as data: what signoff.json holds
parts.py       what a run directory holds: replay, evals, and what each says
coverage.py    which path the decode steps of the exams took, by benchmark and stratum
gates/         what must hold, one file each; the verdict follows from them alone
document.py    from parts to the document: verdict, scope, provenance, deviations, advice
page.py        the document as HTML and Markdown (parity_page.py, grid.py); charts.py and parity_charts.py its charts
cli.py         the verb
"""

"""One self-contained HTML page: for audits of data, and for reports of runs.

markup       HTML and SVG, escaped
plots        bars, stacked bars and scattered points as SVG
style        colours and type
"""

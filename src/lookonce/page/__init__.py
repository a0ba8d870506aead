"""One self-contained HTML page with text, tables, plots and images. It knows nothing of what it reports.

markup    HTML and SVG elements, with all text escaped
plots     columns, bars cut into shares, and points, as SVG
cells     small plots in the cells of a table, as SVG
lines     lines over a common axis, as SVG in a page or a file
sections  a page and its sections: heading, tiles, notices, tables, histograms, image gallery
style     colours and fonts
"""

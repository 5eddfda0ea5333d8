"""Report: a page about one run, or a comparison of several, from what they left in their folders.

    FOLDER --reading--> Run --one_run, compare--> sections of a page --page--> report.html
                               |
                               |- curves   plots over the steps: loss, speed, power, ...
                               `- bars     plots of ranks: memory by part, the pipeline in time

| to change | see |
|---|---|
| a row, a column or a sentence of a run's page | one_run.py; of a comparison: compare.py |
| a plot | curves.py, bars.py; fonts and colours of all: drawing.py |
| the frame, the theme, how a table looks | page.html |
| which records are read, and which are left out | reading.py |
"""

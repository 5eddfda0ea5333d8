"""Report: a page about one run, or a comparison of several, from what they left in their folders.

    FOLDER --reading--> Run --one_run, compare--> numbers and plots --page--> report.html
                               |
                               |- curves     plots over steps: loss, speed, power, ...
                               `- timelines  plots of ranks: the pipeline in time

| to change | see |
|---|---|
| a number, a row | one_run.py; of a comparison: compare.py |
| a title, a caption, the order of a page | one_run.html, comparison.html |
| a plot | curves.py, timelines.py; fonts, colours and sizes of all: drawing.py |
| how a table looks | parts.html |
| the theme, the frame of all pages | page.html; how a number is rounded: page.py |
| which records are read, and which are left out | reading.py |
| README's picture of all schedules | schedules.py |
| docs/explore.html, a page to play with | explore.py; its numbers: explore_data.py |
"""

"""Functions of the course to write again: `python -m exercises`. See docs/teaching.md."""

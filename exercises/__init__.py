"""Functions of the course to write again: `python -m exercises`. See docs/teaching.md."""

from exercises.sealed import install

install()  # before any module that a handout has without its answers; elsewhere it does nothing

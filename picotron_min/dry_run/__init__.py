"""Dry run: any rank of any cluster, in one process without a GPU, from the real step.

    device.py      what a GPU has and this machine lacks
    recorder.py    what a step allocates, sends and waits for
    run.py         build a rank's part of a run, and train it for a step
    messages.py    do the messages of several ranks fit together?

Nothing imports this package: it looks at the trainer from outside.
"""

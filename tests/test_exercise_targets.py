"""Which files of the course have an exercise, and why the others have none."""

from exercises import exercise as catalogue
from exercises.source import COURSE, course_file

WITHOUT = {
    "activations": "formulas that follow from the model's shape; design 3 uses them",
    "memory": "formulas that follow from the model's shape; design 3 uses them",
    "layout": "names and checks of sizes; the designs use it",
    "model_config": "names and shapes, written down as they are in a published config",
    "pipeline_action": "the words that exercises 14 to 17 are written in",
    "mesh": "calls of torch, which name the axes; most exercises use them",
    "parallelize": "puts together what other exercises write",
    "moe": "puts together what exercises 24 to 26 write",
    "linear": "exercise 12 writes its products",
    "adamw": "open: storing a moment in bfloat16 would be one",
    "float8": "open: scaling before rounding would be one",
    "float8_linear": "open: it needs the simulated network to carry bytes of float8",
    "grouped_experts": "open: its product needs a GPU to be faster",
    "offload": "open: its copies need a GPU to be hidden",
    "tensor_overlap": "open: exercise 12 hides its messages by other means",
}


def test_each_course_file_has_an_exercise_or_a_reason():
    files = {path.stem for path in COURSE.glob("*.py")} - {"__init__"}
    targets = {course_file(catalogue.load(number)).stem for number in catalogue.files()}
    assert targets <= files and WITHOUT.keys() <= files
    assert not files - targets - WITHOUT.keys(), "write an exercise, or the reason"

"""Which files of the course have an exercise, and why the others have none."""

from exercises import exercise as catalogue
from exercises.source import COURSE, course_file

WITHOUT = {
    "layout": "names and checks of sizes; the designs use it",
    "model_config": "names and shapes, as they are in a published config",
    "pipeline_action": "the words that exercises 14 to 17 are written in",
    "parallelize": "puts together what other exercises write",
    "float8_linear": "puts together what exercises 10, 12 and 32 write",
}


def test_each_course_file_has_an_exercise_or_a_reason():
    folders = [COURSE, COURSE / "extensions", *(COURSE / "extensions").glob("*/")]
    files = {path.stem for folder in folders for path in folder.glob("*.py")} - {"__init__"}
    files.add("activations")  # of the planner, whose other files have none
    targets = {course_file(catalogue.load(number)).stem for number in catalogue.files()}
    assert targets <= files
    assert files - targets == WITHOUT.keys(), "write an exercise, or the reason"

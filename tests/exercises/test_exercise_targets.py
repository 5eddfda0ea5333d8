"""Which files of the course have an exercise, and why the others have none."""

from exercises import exercise as catalogue
from exercises.source import COURSE, course_file

WITHOUT = {
    "layout.py": "names and checks of sizes; the designs use it",
    "model_config.py": "names and shapes, as they are in a published config",
    "parallelize.py": "puts together what other exercises write",
    "tensor_parallel.py": "exercises 10 to 13 write its parts, in the form that hides messages",
    "extensions/build.py": "chooses extensions by their settings",
    "extensions/settings.py": "names of settings, and their defaults",
    "extensions/kernels/attention.py": "calls torch's kernels, for what exercises 18 and 20 write",
    "extensions/kernels/products.py": "sends products to the faster of two libraries",
    "extensions/experts/balance.py": "divides what exercise 25 counts",
    "extensions/memory/recompute.py": "calls torch's checkpoint and compile",
    "extensions/precision/float8_linear.py": "puts together what exercises 10, 12 and 32 write",
    "extensions/experts/stages.py": "a search; design 1 asks for layers of stages",
    "extensions/documents/attention.py": "runs what rectangles.py plans, as exercise 20 does",
    "extensions/documents/batches.py": "reads borders; the rest is exercise 2",
    "extensions/documents/packing.py": "a search; the rows of its stream are exercise 2's",
    "extensions/multi_token/model.py": "layers and a chain; what is hard is exercise 42",
    "extensions/multi_token/shape.py": "rows and shapes, as in exercise 9",
    "extensions/optimizers/whole_matrices.py": "sends parts of matrices, as exercise 26 sends rows",
    "extensions/qk_norm/shape.py": "rows and shapes, as in exercise 9",
    "extensions/schedules/picture.py": "draws plans",
    "extensions/schedules/registry.py": "lists schedules",
    "extensions/schedules/simulator.py": "puts together what exercise 15 uses",
    "extensions/schedules/split_backward.py": "runs the plans of exercise 27",
    "extensions/sharding/collectives.py": "calls torch's, in place",
    "extensions/sharding/rows.py": "rows and cuts, as in exercises 9 and 29",
}
# extension.py says when extensions are called, and each extension's own calls its other files.
OTHERS = ("__init__.py", "extension.py")


def test_each_course_file_has_an_exercise_or_a_reason():
    paths = [*COURSE.glob("*.py"), *COURSE.glob("extensions/**/*.py")]
    paths.append(COURSE / "planner" / "activations.py")  # the planner's other files have none
    files = {str(path.relative_to(COURSE)) for path in paths if path.name not in OTHERS}
    targets = {
        str(course_file(catalogue.load(number)).relative_to(COURSE)) for number in catalogue.files()
    }
    assert targets <= files
    assert files - targets == WITHOUT.keys(), "write an exercise, or the reason"

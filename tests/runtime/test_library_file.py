"""The shared library as a file: what it needs, what it exports, and from where it can be loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_sessions import run_script

import ort_ops

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="readelf reads the libraries of Linux only")

SYSTEM_LIBRARIES = (
    "libc.",
    "libm.",
    "libstdc++.",
    "libgcc_s.",
    "libpthread.",
    "libdl.",
    "ld-linux",
    "librt.",
)


def readelf(*arguments: str) -> list[str]:
    command = ["readelf", "--wide", *arguments, ort_ops.library_path()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def needed_libraries() -> list[str]:
    return [line.split("[")[1].rstrip("]") for line in readelf("--dynamic") if "(NEEDED)" in line]


def test_needs_no_onnxruntime_and_nothing_that_is_not_on_every_machine_or_beside_it():
    needed = needed_libraries()
    assert needed
    assert not [name for name in needed if "onnxruntime" in name]
    folder = Path(ort_ops.library_path()).parent
    others = [name for name in needed if not name.startswith(SYSTEM_LIBRARIES)]
    assert [name for name in others if not (folder / name).is_file()] == []


def test_finds_its_neighbours_by_its_own_place():
    paths = [line.split("[")[1].rstrip("]") for line in readelf("--dynamic") if "PATH)" in line]
    assert all(path == "$ORIGIN" for path in paths), paths


def test_stays_loaded_because_others_keep_pointers_to_its_operators():
    assert [line for line in readelf("--dynamic") if "FLAGS_1" in line and "NODELETE" in line]


def test_exports_its_entry_points_with_c_names_and_nothing_else():
    exported = set()
    for line in readelf("--dyn-syms"):
        fields = line.split()
        if (
            len(fields) >= 8
            and fields[4] in ("GLOBAL", "WEAK")
            and fields[6] != "UND"
            and fields[3] == "FUNC"
        ):
            exported.add(fields[7].split("@")[0])
    assert "RegisterCustomOps" in exported
    foreign = {name for name in exported if not name.startswith("ort_ops_")} - {"RegisterCustomOps"}
    assert foreign == set()


SCRIPT = """
import sys
import onnxruntime
from operator_models import make_model, run_session
from oracle import assert_matches, make_inputs
inputs = make_inputs((4, 6))
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(sys.argv[1])
session = onnxruntime.InferenceSession(make_model(inputs).SerializeToString(), options)
assert_matches(inputs, **run_session(session, inputs.arrays()))
print("computed")
"""


@pytest.mark.parametrize("folder", ["plain", "with spaces in it", "mit_ümläuten_и_кириллицей_日本"])
@pytest.mark.parametrize("relative", [True, False])
def test_loads_from_any_path_and_working_directory(tmp_path, folder, relative):
    place = tmp_path / folder
    place.mkdir()
    library = Path(ort_ops.library_path())
    for name in (library.name, *needed_libraries()):
        if (library.parent / name).is_file():
            shutil.copy(library.parent / name, place)
    path = f"./{folder}/{library.name}" if relative else str(place / library.name)
    done = run_script(SCRIPT, path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "computed\n"), done.stderr


def test_path_is_absolute_and_independent_of_the_working_directory(tmp_path):
    done = run_script("import ort_ops; print(ort_ops.library_path())", cwd=tmp_path)
    assert done.stdout.strip() == ort_ops.library_path(), done.stderr
    assert Path(ort_ops.library_path()).is_absolute()


def test_runs_where_no_gpu_is_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_script(SCRIPT, ort_ops.library_path())
    assert (done.returncode, done.stdout) == (0, "computed\n"), done.stderr


def test_found_when_python_is_started_among_the_sources():
    # There `import ort_ops` finds the sources, which have no library beside them.
    script = "import ort_ops; print(ort_ops.library_path())"
    root = Path(__file__).resolve().parents[2]
    completed = subprocess.run([sys.executable, "-c", script], cwd=root, text=True, capture_output=True)
    assert completed.returncode == 0, completed.stderr
    assert Path(completed.stdout.strip()).is_file()

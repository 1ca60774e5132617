"""Run the notebooks and keep their outputs: `make notebooks`, or `python tools/run_notebooks.py FILE...`.

Needs nbclient and ipykernel. Times and version numbers that would change with every run are not kept.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"


def run(path: Path) -> None:
    """Run a notebook in its folder, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
        others = [output for output in cell.outputs if output.output_type != "stream"]
        streams = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
        cell.outputs = [*streams, *others]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for each in [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        print(each.name)
        run(each)

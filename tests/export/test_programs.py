"""Programs from anyone: what could run code when it is loaded is refused before torch sees it."""

import copy
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.export import ExportedProgram

from mezzo.export import Deployed, DeployError, load_program
from mezzo.export._programs import checked_archive, is_arithmetic
from mezzo.files import stored_parts

REFUSED = """_sparse_coo_tensor_unsafe.default to_dense.default set_grad_enabled.default manual_seed.default _print.default
set_.source_Tensor resize_.default as_strided.default empty_strided.default empty_permuted.default new_empty_strided.default
_native_batch_norm_legit_no_training.default lstm.data max_pool2d_with_indices_backward.default add.out index_put_.hacked_twin
_embedding_bag.default fractional_max_pool2d.default quantize_per_tensor.default _to_sparse.default""".split()
"""Operators that write or read beyond their tensors, show unwritten memory, or change the process."""


class Evil:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def changed(source: Path, target: Path, change: Callable[[str, bytes], bytes | None], **more: bytes) -> Path:
    """Copy an archive; `change` gives each part's new bytes."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        top = old.namelist()[0].split("/")[0]
        for info in old.infolist():
            data = change(info.filename, old.read(info))
            if data is not None:
                new.writestr(info.filename, data)
        for name, data in more.items():
            new.writestr(f"{top}/{name.replace('__', '/')}", data)
    return target


def edited_json(ending: str, edit: Callable[[Any], None]) -> Callable[[str, bytes], bytes]:
    def change(name: str, data: bytes) -> bytes:
        if not name.endswith(ending):
            return data
        tree = json.loads(data)
        edit(tree)
        return json.dumps(tree).encode()

    return change


def test_a_program_of_ours_is_loaded(segmenter: Deployed) -> None:
    path = segmenter.folder / "model.pt2"
    assert load_program(path).module()(torch.zeros(1, 3, 16, 16)).shape == (1, 16, 16)


def test_pickled_weights_are_refused(segmenter: Deployed, tmp_path: Path) -> None:
    def mark(tree: Any) -> None:
        next(iter(tree["config"].values()))["use_pickle"] = True

    path = changed(segmenter.folder / "model.pt2", tmp_path / "x.pt2", edited_json("weights_config.json", mark))
    with pytest.raises(DeployError, match=r"x.pt2: contains pickled objects; not loaded"):
        load_program(path)


def test_pickled_sample_inputs_are_refused(segmenter: Deployed, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)
    path = changed(
        segmenter.folder / "model.pt2",
        tmp_path / "x.pt2",
        lambda name, data: buffer.getvalue() if "sample_inputs" in name else data,
    )
    load_program(path)  # they are not read
    with pytest.raises(DeployError, match=r"x.pt2: its sample inputs contain more than tensors: .*; not loaded"):
        load_program(path, keep_sizes=True)
    assert not mark.exists()


@pytest.mark.parametrize("key", ["guards_code", "expr_str"])
def test_code_in_place_of_arithmetic_is_refused(key: str, segmenter: Deployed, tmp_path: Path) -> None:
    code = f"__import__('pathlib').Path('{tmp_path / 'ran'}').touch() or 1"

    def put(tree: Any) -> None:
        if key == "guards_code":
            tree["guards_code"] = [code]
        else:
            tree["range_constraints"] = {"s0": {"expr_str": code}}

    path = changed(segmenter.folder / "model.pt2", tmp_path / "x.pt2", edited_json("models/model.json", put))
    with pytest.raises(DeployError, match=r"is not arithmetic on sizes; not loaded"):
        load_program(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "part",
    [
        "data__aotinductor__model__x.so",
        "data__constants__opaque_obj_0",
        "extra__x.py",
        "data__weights__model.pt",
        "data__constants__model.pt",
    ],
)
def test_parts_that_a_program_has_no_need_of_are_refused(part: str, segmenter: Deployed, tmp_path: Path) -> None:
    path = changed(
        segmenter.folder / "model.pt2", tmp_path / "x.pt2", lambda name, data: data, **{part: pickle.dumps(1)}
    )
    with pytest.raises(DeployError, match="which a program of tensors and operators does not need; not loaded"):
        checked_archive(path)


def test_names_that_are_code_are_refused(segmenter: Deployed, tmp_path: Path) -> None:
    code = f"images=__import__('pathlib').Path('{tmp_path / 'ran'}').touch()"

    def change(name: str, data: bytes) -> bytes:
        return data.replace(b'"images"', json.dumps(code).encode()) if name.endswith("models/model.json") else data

    path = changed(segmenter.folder / "model.pt2", tmp_path / "x.pt2", change)
    with pytest.raises(DeployError, match=r"is not (a valid name|the name of a tensor or an operator); not loaded"):
        load_program(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["in_spec", "out_spec"])
def test_specifications_that_import_are_refused(key: str, segmenter: Deployed, tmp_path: Path) -> None:
    context = {"default_factory_module": "evil", "default_factory_name": "x", "dict_context": []}
    spec = {"type": "collections.defaultdict", "context": json.dumps(context), "children_spec": []}

    def put(tree: Any) -> None:
        for call in tree["graph_module"]["module_call_graph"]:
            if call["signature"]:
                call["signature"][key] = json.dumps([1, spec])

    path = changed(segmenter.folder / "model.pt2", tmp_path / "x.pt2", edited_json("models/model.json", put))
    with pytest.raises(DeployError, match="inputs or outputs must be tensors in tuples, lists and dicts; not load"):
        load_program(path)


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "torch.ops.aten.from_file.default", "_operator.methodcaller", "torch.load", "_operator.lshift",
        *(f"torch.ops.aten.{name}" for name in REFUSED), "torch.ops.higher_order.cond", "torch.ops.prims.add.default",
        "torch._C._set_grad_enabled", "torch.ops.aten.conv2d", "torch.ops.aten.relu.__call__", "torch.sym_fresh_size",
    ],
)  # fmt: skip
def test_operators_that_do_more_than_compute_are_refused(target: str, segmenter: Deployed, tmp_path: Path) -> None:
    def put(tree: Any) -> None:
        tree["graph_module"]["graph"]["nodes"][0]["target"] = target

    path = changed(segmenter.folder / "model.pt2", tmp_path / "x.pt2", edited_json("models/model.json", put))
    with pytest.raises(
        DeployError, match=f"the operator '{target.removeprefix('torch.ops.aten.')}' is not among those"
    ):
        load_program(path)


def test_torch_is_given_a_copy_of_what_was_looked_at(segmenter: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch.export, "load", seen.append)
    load_program(segmenter.folder / "model.pt2")
    (given,) = seen
    assert isinstance(given, io.BytesIO)
    with zipfile.ZipFile(given) as kept, zipfile.ZipFile(segmenter.folder / "model.pt2") as written:
        assert kept.namelist() == written.namelist()


@pytest.mark.parametrize("tree", [{}, [], 3, {"graph_module": {"graph": {"nodes": [1]}}}])
def test_another_graph_is_one_line(tree: object, segmenter: Deployed, tmp_path: Path) -> None:
    path = changed(
        segmenter.folder / "model.pt2",
        tmp_path / "x.pt2",
        lambda name, data: json.dumps(tree).encode() if name.endswith("models/model.json") else data,
    )
    with pytest.raises(DeployError, match=r"x.pt2: is not a torch.export program: "):
        load_program(path)


def test_what_is_no_archive_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.pt2").write_bytes(b"rubbish")
    with pytest.raises(DeployError, match=r"x.pt2: is not a torch.export program: File is not a zip file"):
        load_program(tmp_path / "x.pt2")


def test_an_archive_without_a_program_is_one_line(segmenter: Deployed, tmp_path: Path) -> None:
    path = changed(
        segmenter.folder / "model.pt2",
        tmp_path / "x.pt2",
        lambda name, data: None if name.endswith("model.json") else data,
    )
    with pytest.raises(DeployError, match=r"x.pt2: torch cannot load the program: .*; export again with this torch"):
        load_program(path)


@pytest.mark.parametrize(
    "text",
    [
        "Pow(Symbol('s0', integer=True), Integer(2))",
        "L['x'].size()[2]**2 <= 9",
        "Float('0.5', precision=53)",
        "Symbol('s0', positive=True, integer=True)",
        "Max(Integer(1), FloorDiv(Symbol('s0', integer=True), Integer(2)))",
        "((1 + (((-1) + L['x'].size()[3]) // 2))*(1 + L['images'].size()[2])) != 1",
        "2 <= L['x'].size()[0] and L['x'].size()[0] <= 8",
        "(torch.sym_max(1, L['x'].size()[3] // 2)*torch.sym_min(9, L['x'].size()[2] // 2)) != 1",  # since torch 2.14
    ],
)
def test_arithmetic_on_sizes_is_known(text: str) -> None:
    assert is_arithmetic(text)


@pytest.mark.parametrize(
    "text",
    [
        "open('x')", "L['x'].__class__", "().__class__.__bases__", "[x for x in L]", "lambda: 1", "eval('1')", "x := 1",
        "L[print(1)]", "Symbol('__import__(1)')", "getattr(L, 'size')", "f'{L}'", "1 +", "", "exec", None, 3,
        "9**9**9", "Pow(Integer(9), Pow(Integer(9), Integer(9)))", "((9**8)**8)**8", "1 << 99", "'a' * 9", "9" * 30,
        "L['x'].size() * 9", "L", "Mul(" + "Integer(9), " * 300 + "9)", "-" * 300 + "1", "1 + " * 40_000 + "1", "2**s0",
        "1 # comment", "1\n+1", "Integer.__init__", "L['x'].size", "__builtins__",
        "torch.load('x')", "torch.sym_max", "torch.sym_max.__call__(1, 2)", "torch.ops.sym_max(1)", "L['x'].sym_max(1)",
        "torch.sym_max(torch.load('x'), 1)", "torch.sym_max(a=1)", "os.sym_max(1)",
    ],
)  # fmt: skip
def test_everything_else_is_not(text: object) -> None:
    assert not is_arithmetic(text) or text == "L['x'].size"


@given(st.text("LSymbolIntegers0123()[]'\".,+-*/%<>=!_ ", max_size=40))
def test_whatever_passes_cannot_do_more_than_compute(text: str) -> None:
    if is_arithmetic(text):
        names = {"Symbol": lambda *a, **k: 3, "Integer": int, "L": {}, "s0": 2}
        try:
            value = eval(text, {"__builtins__": {}}, names)
        except Exception:  # noqa: BLE001  # sizes that are not there, a division by zero: harmless
            return
        assert not callable(value) or value in names.values()


def test_sizes_of_results_are_read_only_where_they_are_needed(segmenter: Deployed) -> None:
    """They are expressions that torch takes minutes to read for a large network; running needs none of them."""
    path = segmenter.folder / "model.pt2"
    quick, whole = load_program(path), load_program(path, keep_sizes=True)

    def free_sizes(program: ExportedProgram) -> int:
        values = (node.meta.get("val") for node in program.graph.nodes if node.op == "call_function")
        return sum(
            isinstance(size, torch.SymInt) for value in values if hasattr(value, "shape") for size in value.shape
        )

    assert free_sizes(quick) == 0 < free_sizes(whole)
    for size in ((1, 3, 16, 16), (2, 3, 24, 40), (1, 3, 17, 23)):
        images = torch.randn(size)
        assert torch.equal(quick.module()(images), whole.module()(images))


def test_an_archive_that_is_compressed_is_refused_before_it_is_unpacked(segmenter: Deployed, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/models/model.json", b" " * 2**24)
    with pytest.raises(DeployError, match="compressed"):
        load_program(tmp_path / "x.pt2")


def listed_again(path: Path, name: str) -> None:
    """Write an archive with one part whose bytes are listed a second time, under a name."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/models/b.json", b" " * 2000)
        archive.filelist.append(copy.copy(archive.getinfo("a/models/b.json")))
        archive.filelist[-1].filename = name


@pytest.mark.parametrize(
    ("name", "word"),
    [("a/models/c.json", "parts are larger than the file"), ("a/models/b.json", "two parts of one name")],
)
def test_parts_that_lie_on_each_other_or_have_one_name_are_refused(name: str, word: str, tmp_path: Path) -> None:
    listed_again(tmp_path / "x.pt2", name)
    with zipfile.ZipFile(tmp_path / "x.pt2") as archive, pytest.raises(ValueError, match=word):
        stored_parts(archive, (tmp_path / "x.pt2").stat().st_size)
    with pytest.raises(DeployError, match=f"{word}|overlap"):
        load_program(tmp_path / "x.pt2")


@pytest.mark.parametrize(("strides", "numbers"), [([0], None), ([1], b"")])
def test_weights_that_claim_more_than_they_are_are_refused(
    strides: list[int], numbers: bytes | None, segmenter: Deployed, tmp_path: Path
) -> None:
    def claim(tree: Any) -> None:
        meta = tree["config"][sorted(tree["config"])[0]]["tensor_meta"]
        meta["sizes"], meta["strides"] = [{"as_int": 10**12}], [{"as_int": stride} for stride in strides]

    edit = edited_json("weights_config.json", claim)
    path = changed(
        segmenter.folder / "model.pt2",
        tmp_path / "x.pt2",
        lambda name, data: numbers if numbers is not None and "/weight_" in name else edit(name, data),
    )
    with pytest.raises(DeployError, match="MEZZO_MAX_UNPACKED" if numbers is None else "no numbers|not loaded"):
        load_program(path)


@pytest.mark.parametrize("name", ["__class__", "a.__dict__.b"])
def test_names_of_pythons_own_attributes_are_refused(name: str, segmenter: Deployed, tmp_path: Path) -> None:
    def change(part: str, data: bytes) -> bytes:
        return data.replace(b'"images"', json.dumps(name).encode()) if part.endswith("models/model.json") else data

    path = changed(segmenter.folder / "model.pt2", tmp_path / "x.pt2", change)
    with pytest.raises(DeployError, match=r"is not (a valid|the) name"):
        load_program(path)


def test_what_torch_refuses_is_one_line_without_a_traceback(
    segmenter: Deployed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(tree: Any) -> None:
        tree["graph_module"]["graph"]["nodes"][0]["inputs"] = []

    path = changed(segmenter.folder / "model.pt2", tmp_path / "x.pt2", edited_json("models/model.json", change))
    with pytest.raises(DeployError, match="torch cannot load the program"):
        load_program(path).module()(torch.zeros(1, 3, 16, 16))
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("ending", ["models/model.json", "weights_config.json"])
@pytest.mark.parametrize("device", [{"type": "meta", "index": None}, {"type": "privateuseone"}, "meta", {}])
def test_devices_without_numbers_are_refused(device: object, ending: str, segmenter: Deployed, tmp_path: Path) -> None:
    def change(tree: Any) -> None:
        tensors = tree["config"] if "config" in tree else tree["graph_module"]["graph"]["tensor_values"]
        entry = next(iter(tensors.values()))
        entry.get("tensor_meta", entry)["device"] = device

    path = changed(segmenter.folder / "model.pt2", tmp_path / "x.pt2", edited_json(ending, change))
    with pytest.raises(DeployError, match="device other than cpu and cuda"):
        load_program(path)


@pytest.mark.parametrize("text", ["1e999", "5", "-NaN", "infinity"])
def test_other_texts_are_no_numbers(text: str, segmenter: Deployed, tmp_path: Path) -> None:
    def change(tree: Any) -> None:
        nodes = tree["graph_module"]["graph"]["nodes"]
        nodes[-1]["inputs"].append({"name": "x", "arg": {"as_float": text}, "kind": 2})

    path = changed(segmenter.folder / "model.pt2", tmp_path / "x.pt2", edited_json("models/model.json", change))
    with pytest.raises(DeployError, match="as_float"):
        load_program(path)


@pytest.mark.parametrize("text", ["[1" + "0" * 4000 + ", {}]", "[" * 300 + "]" * 300, "[NaN, {}]"])
def test_a_specification_is_read_within_the_bounds_of_other_texts(
    text: str, segmenter: Deployed, tmp_path: Path
) -> None:
    def put(tree: Any) -> None:
        for call in tree["graph_module"]["module_call_graph"]:
            if call["signature"]:
                call["signature"]["in_spec"] = text

    path = changed(segmenter.folder / "model.pt2", tmp_path / "x.pt2", edited_json("models/model.json", put))
    with pytest.raises(DeployError, match=r"too large|nested|NaN"):
        load_program(path)

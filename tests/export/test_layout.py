# SPDX-License-Identifier: Apache-2.0
"""The export folder: what is written is what was trained, and a changed or foreign one is refused.

Oracles: the safetensors file is parsed here by hand from its published format (8 bytes of header
length, JSON header, raw bytes), hashes come from hashlib over those bytes. All comparisons exact.
"""

import hashlib
import json
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from atomic_lib.export import read_export, write_export

SOURCE = {"run_id": "train_hybrid-tiny", "step": 3}


@pytest.fixture(scope="module")
def written(tmp_path_factory, parameters, config):
    folder = tmp_path_factory.mktemp("written")
    write_export(folder, parameters, config, source=SOURCE)
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "model")


def tensors_by_hand(path):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        assert entry["dtype"] == "F32", name
        found[name] = (tuple(entry["shape"]), content[start:end])
    return found, metadata


def test_the_file_holds_every_parameter_bit_for_bit(folder, parameters):
    found, metadata = tensors_by_hand(folder / "model.safetensors")
    assert metadata == {"layout": "flax", "run_id": "train_hybrid-tiny", "step": "3"}
    assert sorted(found) == sorted(parameters)
    for name, value in parameters.items():
        shape, content = found[name]
        assert shape == value.shape, name
        assert content == np.asarray(value).astype("<f4").tobytes(), name


def test_names_are_paths_and_dense_kernels_are_in_by_out(folder, config):
    found, _ = tensors_by_hand(folder / "model.safetensors")
    assert found["block_0/mixer_0/q/kernel"][0] == (16, config.num_heads * config.head_dim)
    assert found["block_0/ffn/up/kernel"][0] == (16, 32)
    assert found["block_0/ffn/down/kernel"][0] == (32, 16)


def test_a_tied_embedding_is_stored_once_and_recorded(folder):
    found, _ = tensors_by_hand(folder / "model.safetensors")
    assert [name for name, (shape, _) in found.items() if 80 in shape] == ["embedding/table"]
    layout = json.loads((folder / "config.json").read_text())["layout"]
    assert layout["output_embedding"] == "embedding/table"
    assert layout["dense_kernels"] == "[in, out]"


def test_export_json_describes_each_tensor(folder):
    found, _ = tensors_by_hand(folder / "model.safetensors")
    facts = json.loads((folder / "export.json").read_text())
    assert facts["source"] == SOURCE
    assert [entry["name"] for entry in facts["tensors"]] == sorted(found)
    for entry in facts["tensors"]:
        shape, content = found[entry["name"]]
        values = np.frombuffer(content, "<f4")
        assert entry["shape"] == list(shape), entry
        assert entry["sha256"] == hashlib.sha256(content).hexdigest(), entry
        assert entry["finite"] is True, entry
        assert entry["absmax"] == float(np.abs(values).max()), entry
    assert facts["parameters"] == sum(len(content) // 4 for _, content in found.values())
    for name in ("model.safetensors", "config.json"):
        content = (folder / name).read_bytes()
        want = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert facts["files"][name] == want


def test_reading_gives_the_configuration_and_the_parameters(folder, config, parameters):
    exported = read_export(folder)
    assert exported.config == config
    for name, value in parameters.items():
        np.testing.assert_array_equal(exported.tensors[name], np.asarray(value), err_msg=name)


def _flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "export.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{name} does not exist"):
        read_export(folder)


def test_a_flipped_weight_names_its_tensor(folder):
    _flip(folder / "model.safetensors", -1)
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor \S+ is .*sha256"):
        read_export(folder)


def test_a_flipped_header_is_refused(folder):
    _flip(folder / "model.safetensors", 8)
    with pytest.raises(ValueError, match=r"is no safetensors file"):
        read_export(folder)


def test_a_cut_file_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"is no safetensors file"):
        read_export(folder)


def test_an_edited_configuration_is_refused(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 500000.0'))
    with pytest.raises(ValueError, match=r"config\.json: it has .*export\.json records"):
        read_export(folder)


def test_another_shape_in_the_configuration_is_refused(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"ffn_size": 32', '"ffn_size": 48'))
    with pytest.raises(
        ValueError, match=r"ffn/\w+/kernel has shape \(\d+, \d+\); the configuration"
    ):
        read_export(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"architectures": ["GPT2LMHeadModel"]}', r"schema None.*another project's model"),
        ('{"schema": "atomic-model/2"}', "schema 'atomic-model/2'.*newer version"),
        ("[]", "schema None"),
        ("{", r"config\.json is no JSON"),
    ],
)
def test_a_foreign_folder_is_refused_with_the_reason(folder, content, message):
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_export(folder)


def test_a_hugging_face_folder_is_no_export(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"is no export of this suite; it needs"):
        read_export(tmp_path)


def _without(name):
    return lambda p: {key: value for key, value in p.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("final_norm/scale"), r"missing \['final_norm/scale'\] \(1\)"),
        (lambda p: {**p, "extra": p["final_norm/scale"]}, r"unknown \['extra'\]"),
        (lambda p: {**p, "final_norm/scale": p["final_norm/scale"][:8]},
         r"final_norm/scale has shape \(8,\); the configuration makes it \(16,\)"),
        (lambda p: {**p, "final_norm/scale": p["final_norm/scale"].astype("float16")},
         r"final_norm/scale is float16; exports are float32"),
        (lambda p: {**p, "final_norm/scale": p["final_norm/scale"].at[3].set(float("nan"))},
         r"not finite, by tensor: \{'final_norm/scale': 1\}"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "nan"],
)  # fmt: skip
def test_wrong_parameters_are_refused_before_anything_is_written(
    tmp_path, parameters, config, change, message
):
    with pytest.raises(ValueError, match=message):
        write_export(tmp_path / "model", change(parameters), config, source=SOURCE)
    assert not (tmp_path / "model").exists()


def test_a_writer_that_dies_leaves_no_export(folder, parameters, config, monkeypatch):
    def die(*arguments, **named):
        raise OSError("disk gone")

    monkeypatch.setattr("atomic_lib.export.layout.save_file", die)
    with pytest.raises(OSError, match="disk gone"):
        write_export(folder, parameters, config, source=SOURCE)
    with pytest.raises(FileNotFoundError, match=r"export\.json does not exist"):
        read_export(folder)


def test_a_disk_that_changes_a_bit_is_noticed_while_writing(
    tmp_path, parameters, config, monkeypatch
):
    def save_with_a_flipped_bit(tensors, path, metadata):
        changed = {name: value.copy() for name, value in tensors.items()}
        changed["final_norm/bias"].view(np.uint32)[5] ^= 1
        save_file(changed, path, metadata=metadata)

    monkeypatch.setattr("atomic_lib.export.layout.save_file", save_with_a_flipped_bit)
    with pytest.raises(ValueError, match="tensor final_norm/bias is"):
        write_export(tmp_path, parameters, config, source=SOURCE)


def test_transposed_arrays_are_stored_in_their_own_order(tmp_path, parameters, config):
    name = "block_0/ffn/up/kernel"
    flipped = {**parameters, name: np.asfortranarray(np.asarray(parameters[name]))}
    write_export(tmp_path, flipped, config, source=SOURCE)
    assert tensors_by_hand(tmp_path / "model.safetensors")[0][name][1] == (
        np.asarray(parameters[name]).tobytes()
    )

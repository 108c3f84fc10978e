"""Hugging Face folders: read strictly, scored as transformers does, written back bit for bit."""

import importlib
import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_core.actors import export, hf
from rl_core.actors.forward import PackedBatch, attach_scoring, score
from rl_core.api.errors import ConfigError, InfrastructureError
from tests import actor_samples

CPU = torch.device("cpu")


def load(folder, dtype=torch.float32):
    model = hf.build_model(hf.read_config(folder), dtype=dtype)
    aliases = hf.tied_names(model)
    attach_scoring(model)
    hf.materialize(model, CPU, aliases)
    hf.load_weights(model, folder, aliases)
    return model


@pytest.fixture
def copy(model_folder, tmp_path):
    """A copy of the model folder that a test may harm."""
    return shutil.copytree(model_folder, tmp_path / "copy")


def change_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "mistral window": {"sliding_window": 5},
    "olmo2": {},
    "gemma": {},
    "qwen3_moe": actor_samples.EXPERTS,
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
"""Family, with a word for what is special, -> settings of its configuration."""


def class_of(folder):
    config = json.loads((folder / "config.json").read_text())
    package = importlib.import_module(f"transformers.models.{config['model_type']}.modeling_{config['model_type']}")
    return getattr(package, config["architectures"][0])


def padded_scores(model, ids, lengths, temperature):
    """Return log-probabilities [B, S] of a plain transformers forward on right-padded rows, with gradient."""
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    logits = model(ids, attention_mask=mask.long()).logits / temperature
    scored = torch.zeros(ids.shape)
    scored[:, 1:] = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    mask[:, 0] = False
    return scored, mask


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_scores_and_gradients_equal_a_plain_padded_forward(family, tmp_path):
    settings = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "head_dim": 8} | FAMILIES[family]
    folder = actor_samples.make_model(tmp_path, tied=False, family=family.split()[0], **settings)
    ours, theirs = load(folder), class_of(folder).from_pretrained(folder, attn_implementation="eager")
    torch.manual_seed(1)
    lengths = [20, 3, 20, 7, 1, 12]
    ids = torch.randint(0, 24, (6, 20))
    expected, mask = padded_scores(theirs, ids, lengths, 0.7)
    weight = torch.randn(mask.shape)
    got, entropy, *_ = score(ours, PackedBatch.of(ids, lengths, mask, CPU), temperature=0.7, entropy=True)
    assert torch.allclose(got[mask], expected[mask], atol=1e-5)
    assert not got[~mask].any()
    assert entropy.shape == got.shape and (entropy[mask] > 0).all()
    (got * weight)[mask].sum().backward()
    (expected * weight)[mask].sum().backward()
    grads = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter.grad, grads[name].grad, atol=1e-5), name


def test_the_padding_token_trains_like_any_other_since_packed_rows_have_no_padding(copy):
    ids, lengths = torch.randint(0, 24, (4, 12)), [12] * 4
    gradients = []
    for padding in (None, 3):
        change_config(copy, pad_token_id=padding)
        model = load(copy)
        got, *_ = score(
            model,
            PackedBatch.of(ids, lengths, torch.ones(4, 12, dtype=torch.bool), CPU),
            temperature=1.0,
            entropy=False,
        )
        got.sum().backward()
        gradients.append(model.model.embed_tokens.weight.grad)
    assert torch.equal(*gradients)


def test_the_model_still_answers_the_usual_call(model_folder):
    model = load(model_folder)
    ids = torch.randint(0, 24, (2, 9))
    plain = model(ids).logits
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.int64), ids), dim=1)
    mask = torch.arange(12)[None].expand(2, 12) >= 3
    left = model(padded, attention_mask=mask.long(), position_ids=(torch.arange(12)[None] - 3).clamp(min=0)).logits
    assert torch.allclose(left[:, 3:], plain, atol=1e-5)


def test_tied_weights_stay_one_parameter(model_folder):
    model = load(model_folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert hf.tied_names(model) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_tied_weight_may_be_stored_under_its_other_name(copy, model_folder):
    change_weights(copy, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(load(copy).lm_head.weight, load(model_folder).lm_head.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing: model\.norm\.weight; unused: none"),
        (lambda t: t.update({"extra.weight": torch.zeros(1)}), r"missing: none; unused: extra\.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), r"model\.norm\.weight .* shape \[32\].*got \[5\]"),
    ],
    ids=["missing", "unused", "shape"],
)
def test_weights_that_do_not_fit_the_config_are_listed(copy, change, message):
    change_weights(copy, change)
    with pytest.raises(ConfigError, match=message):
        load(copy)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"folder with config\.json"),
        (lambda f: (f / "config.json").write_text("{"), "must be JSON"),
        (
            lambda f: (f / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}'),
            "end in ForCausalLM, got GPT2",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "convert the weights to safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 50), "whole safetensors file"),
        (lambda f: (f / "config.json").write_text("[]"), "hold an object, got list"),
        (lambda f: change_config(f, num_hidden_layers=3), r"describe a Qwen2ForCausalLM: .*layer_types"),
        (lambda f: change_config(f, hidden_act="nope"), r"describe a Qwen2ForCausalLM: KeyError: 'nope'"),
        (lambda f: change_config(f, architectures=5), "architecture in .* got 5"),
        (lambda f: (f / hf.INDEX).write_text("{"), "JSON with a weight_map"),
        (lambda f: (f / hf.INDEX).write_text("{}"), "JSON with a weight_map"),
        (lambda f: use_index(f).unlink(), r"files its .*, got no model-1\.safetensors"),
        (lambda f: truncate(use_index(f)), "whole safetensors file"),
    ],
    ids=[
        *("no config", "no json", "architecture", "no weights", "broken weights", "no object", "contradiction"),
        *("activation", "architecture no list"),
        *("index no json", "index empty", "file absent", "file cut"),
    ],
)
def test_folders_that_are_no_model_are_refused_with_a_way_out(copy, harm, message):
    harm(copy)
    with pytest.raises(ConfigError, match=message):
        load(copy)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def use_index(folder):
    """Rename the weights to a file that an index names; return it."""
    names = list(load_file(folder / "model.safetensors"))
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    return (folder / "model.safetensors").rename(folder / "model-1.safetensors")


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def export_model(model, source, target, dtype=torch.float32):
    tensors = hf.stored_tensors(model)
    plans = [export.TensorPlan(name=n, shape=tuple(t.shape), dtype=dtype) for n, t in tensors.items()]
    export.export_folder(target, source=source, plans=plans, tensors=tensors.items())
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tied", "model"),
    [(True, {}), (False, {}), (False, {"family": "qwen3_moe"} | actor_samples.EXPERTS)],
    ids=["tied", "untied", "experts"],
)
def test_an_unchanged_model_exports_the_bits_it_was_read_from(tmp_path, dtype, tied, model):
    source = actor_samples.make_model(tmp_path / "source", tied=tied, dtype=dtype, **model)
    target = export_model(load(source), source, tmp_path / "target", dtype)
    theirs, ours = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(theirs[name].equal(ours[name]) and theirs[name].dtype == ours[name].dtype for name in theirs)
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    again = class_of(target).from_pretrained(target, dtype="auto")
    assert again.dtype == dtype and (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_a_large_model_is_cut_into_files_with_an_index(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 8192)
    model = load(model_folder)
    target = export_model(model, model_folder, tmp_path / "target")
    index = json.loads((target / hf.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in hf.stored_tensors(model).values())
    assert all((target / name).stat().st_size < 8192 + 4096 for name in index["weight_map"].values())
    again = load(target)
    for name, tensor in hf.stored_tensors(model).items():
        assert torch.equal(tensor, hf.stored_tensors(again)[name])


def test_a_shard_goes_to_the_disk_in_parts_while_it_is_written(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SYNC_BYTES", 4096)
    sizes, plain = {}, os.fsync

    def fsync(descriptor):
        plain(descriptor)
        found = os.fstat(descriptor)
        sizes.setdefault(found.st_ino, []).append(found.st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    model = load(model_folder)
    target = export_model(model, model_folder, tmp_path / "target")
    steps = sizes[(target / hf.SINGLE).stat().st_ino]
    largest = max(tensor.nbytes for tensor in hf.stored_tensors(model).values())
    assert all(after - before <= 4096 + largest for before, after in pairwise(steps))
    assert steps[-1] == (target / hf.SINGLE).stat().st_size > 3 * (4096 + largest)


def test_an_export_replaces_the_old_folder_whole(model_folder, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old.txt").write_text("")
    export_model(load(model_folder), model_folder, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]
    assert not (target / "old.txt").exists()


def test_an_export_that_cannot_take_its_place_puts_the_old_folder_back(model_folder, tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old.txt").write_text("")
    rename = Path.rename

    def refuse(self, other):
        if self.name.endswith(".staging"):
            raise OSError(28, "No space left on device")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(InfrastructureError, match="No space left"):
        export_model(load(model_folder), model_folder, target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"] and (target / "old.txt").exists()


def test_an_export_that_fails_leaves_the_old_folder(model_folder, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old.txt").write_text("")
    plans = [export.TensorPlan(name="w", shape=(1,), dtype=torch.float32)]

    def full_disk():
        raise OSError(28, "No space left on device")
        yield

    with pytest.raises(InfrastructureError, match="No space left"):
        export.export_folder(target, source=model_folder, plans=plans, tensors=full_disk())
    assert [path.name for path in tmp_path.iterdir()] == ["target"] and (target / "old.txt").exists()

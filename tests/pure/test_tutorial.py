"""The tutorial's configurations: accepted as they are, translated whole, and refused in one line that says what to change."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import data, zoo
from meshwright.cli.main import main
from meshwright.core.errors import RequestError
from meshwright.core.task import Field
from meshwright.data.instructions import IGNORE_INDEX, ByteTokenizer, InstructionDataset, InstructionRecord, find_tokenizer
from meshwright.data.instructions import load as load_instructions
from meshwright.observe.step_lines import format_step_line
from meshwright.orchestrate.config import RunConfig, load_config
from meshwright.orchestrate.job import load_dataset, load_task, resolve_job
from meshwright.orchestrate.lr_schedule import learning_rate

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
RECORDS = [{"instruction": f"Add {n} and {n}.", "input": "" if n % 3 else "In digits.", "output": str(2 * n) * (1 + n % 5)} for n in range(20)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model without weights and a small file of instructions, to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "x.json").write_text(json.dumps(RECORDS))
    return tmp_path


def translated(file: str | dict[str, Any], ranks: int = 4, **settings: Any) -> RunConfig:
    """A file of configs/, or one made of a dictionary, on a machine of so many devices."""
    path = CONFIGS / f"{file}.json" if isinstance(file, str) else Path("own.json")
    if not isinstance(file, str):
        path.write_text(json.dumps(file))
    chosen = {"random_init": True, "data": "x.json", **settings}
    return load_config(path, {key: value for key, value in chosen.items() if value is not None}, lambda number, _: number or ranks)


# The five files


FILES: dict[str, dict[str, Any]] = {
    "single_gpu": {"model": "hf:phi-1_5", "mesh": "dp=1", "zero": 0, "precision": "fp32", "global_batch": 32, "micro_batches": 1},
    "ddp": {"model": "hf:phi-1_5", "mesh": "dp=4", "zero": 0, "precision": "bf16", "global_batch": 128, "micro_batches": 1},
    "fsdp": {"model": "hf:Llama-2-7b", "mesh": "shard=4", "zero": 3, "precision": "bf16", "global_batch": 32, "micro_batches": 8},
    "axonn": {"model": "hf:Llama-2-7b", "mesh": "tp=2x2", "zero": 0, "precision": "bf16", "global_batch": 32, "micro_batches": 8},
}


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_accepted_unchanged(name: str, here: Path) -> None:
    found = translated(name)
    assert {key: getattr(found, key) for key in FILES[name]} == FILES[name]
    recipe = (found.optimizer, found.learning_rate, found.betas, found.adam_eps, found.weight_decay, found.clip)
    assert recipe == ("adamw", 1e-5, (0.9, 0.95), 1e-5, 0.0, 1.0)
    assert (found.lr_schedule, found.warmup_steps, found.recompute, found.seq, found.validate_batches) == ("cosine", 100, "full", 256, 0)
    assert (found.seed, found.log_interval, found.epochs, found.compile, found.data) == (123456, 1, 1, "none", "x.json")
    assert RunConfig(**json.loads(found.model_dump_json())) == found  # as job.json hands it to the ranks


def test_a_file_for_inference_is_not_trained_by_mistake(here: Path) -> None:
    with pytest.raises(RequestError, match=r"inference_axonn.json has no training keys .* `meshwright generate`"):
        translated("inference_axonn")
    found = translated("inference_axonn", global_batch=8)
    assert (found.model, found.mesh, found.global_batch, found.precision) == ("hf:Llama-3-8B-Instruct", "dp=4", 8, "bf16")


def test_settings_in_the_words_of_both(here: Path) -> None:
    found = translated("axonn", tp_dimensions=[1, 2, 1], precision=32, compile=True, learning_rate=1e-3, num_epochs=3, seed=7)
    assert (found.mesh, found.precision, found.compile, found.learning_rate, found.epochs, found.seed) == ("dp=2,tp=2", "fp32", "blocks", 1e-3, 3, 7)
    found = translated("ddp", nproc=2, precision="fp64", compile="model", steps=5, global_batch=6, mesh="shard=2", zero=1)
    assert (found.mesh, found.zero, found.precision, found.compile, found.steps, found.epochs) == ("shard=2", 1, "fp64", "model", 5, None)
    assert translated("fsdp", ranks=1).mesh == "dp=1"  # nothing to shard over: one device
    assert translated("ddp", strategy="own.py:change").strategy == "own.py:change"  # ours: a function that changes the plan


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "key": ({"model_id": "tiny", "gradient_acc_step": 2}, {}, "unknown key 'gradient_acc_step' in own.json; did you mean 'gradient_acc_steps'"),
    "strategy": ({"model_id": "tiny", "strategy": "dpd"}, {}, r"own.json: strategy=\"dpd\": input should be 'single_device', 'ddp', "),
    "precision": ({"model_id": "tiny", "precision": "bf16-true"}, {}, "own.json: precision=\"bf16-true\": use one of 32, .*bf16-mixed"),
    "truth": ({"model_id": "tiny", "global_batch_size": True}, {}, "global_batch_size=true: input should be a valid integer"),
    "dimensions": ({"model_id": "tiny", "tp_dimensions": [2, 2]}, {}, "write three numbers, like"),
    "zero dimension": ({"model_id": "tiny", "tp_dimensions": [0, 1, 1]}, {}, "tp_dimensions.0=0: input should be greater than or equal to 1"),
    "many ranks": ({"tp_dimensions": [2, 4, 1]}, {}, "needs 8 ranks, and this machine has 4 devices: change tp_dimensions to a product of 4"),
    "odd ranks": ({"tp_dimensions": [3, 1, 1]}, {}, "needs a multiple of 3 ranks, and there are 4: use --nproc 3"),
    "other strategy": ({"strategy": "ddp", "tp_dimensions": [2, 1, 1]}, {}, "is for strategy axonn, not ddp"),
    "one device": ({"strategy": "single_device", "num_epochs": 1}, {"nproc": 2}, "strategy single_device has 1 rank, and --nproc is 2"),
    "batch": ({"strategy": "ddp", "global_batch_size": 18, "gradient_acc_steps": 2}, {}, "change global_batch_size to 16 or 24"),
    "both lengths": ({"strategy": "ddp", "num_epochs": 2}, {"steps": 2, "epochs": 2}, "steps and epochs both say how long"),
    "setting": ({"model_id": "tiny"}, {"tp_dimension": [1]}, "unknown key 'tp_dimension' in --set; did you mean 'tp_dimensions'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, here: Path) -> None:
    file, settings, message = MISTAKES[name]
    with pytest.raises(RequestError, match=message) as caught:
        translated({"global_batch_size": 4, **file}, **settings)
    assert "\n" not in str(caught.value)


def test_the_command_line_exits_with_2(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "own.json").write_text('{"model_id": "tiny", "stratgy": "ddp"}')
    with pytest.raises(SystemExit) as ended:
        main(["train", "own.json"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "meshwright: unknown key 'stratgy' in own.json; did you mean 'strategy'?\n"


# Models and data at hand


def test_a_model_id_is_a_folder_or_published_sizes(here: Path) -> None:
    assert translated({"model_id": "somebody/tiny"}, global_batch=4).model == "hf:tiny"
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "own.json").write_text('{"model_id": "other", "num_epochs": 1}')
    (here / "tiny").rename(here / "elsewhere" / "other")
    config = load_config(Path("elsewhere/own.json"), {"random_init": True, "data": "x.json"}, lambda *_: 1)
    assert config.model == "hf:elsewhere/other"
    assert translated({"model_id": "microsoft/PHI-1_5"}, global_batch=4).model == "hf:microsoft/PHI-1_5"
    with pytest.raises(RequestError, match=r"unknown model_id 'lama-2-7b' in own.json; did you mean 'Llama-2-7b'"):
        translated({"model_id": "meta/lama-2-7b"}, global_batch=4)


def test_weights_are_wanted_unless_random_ones_are(here: Path) -> None:
    with pytest.raises(RequestError, match=r"no folder with weights of phi-1_5 was found: use --set model_id=PATH, or --set random_init=true"):
        translated("ddp", random_init=False)
    with pytest.raises(RequestError, match=r"tiny has no weights \(\*.safetensors\): put them there, or .* --set random_init=true"):
        translated("ddp", random_init=False, model_id="tiny")
    with pytest.raises(RequestError, match=r"no file of dataset alpaca was found: use --data PATH"):
        translated("ddp", data=None)
    (here / "alpaca.json").write_text(json.dumps(RECORDS))
    assert translated("ddp", data=None).data == "alpaca.json"


def test_weights_in_the_folder_are_loaded(here: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    torch.manual_seed(5)
    kept = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained("tiny"))
    kept.save_pretrained("tiny")
    config = translated("ddp", random_init=False, model_id="tiny")
    made = load_task(config).build()
    assert made.training
    assert all(torch.equal(a, b) for a, b in zip(made.state_dict().values(), kept.state_dict().values(), strict=True))
    assert not torch.equal(load_task(config.model_copy(update={"random_init": True})).build().lm_head.weight, kept.lm_head.weight)
    with torch.device("meta"):
        assert load_task(config).build().lm_head.weight.is_meta
    (weights,) = Path("tiny").glob("*.safetensors")
    save_file({name: values for name, values in kept.state_dict().items() if "layers.1" not in name}, weights, {"format": "pt"})
    with pytest.raises(RequestError, match=r"its weights lack 9 tensors of the model, such as model.layers.1"):
        load_task(config).build()
    weights.write_bytes(b"broken")
    with pytest.raises(RequestError, match="its weights cannot be loaded") as caught:
        load_task(config).build()
    assert "\n" not in str(caught.value)


SIZES = {"phi-1_5": 1_418_270_720, "TinyLlama-1.1B": 1_100_048_384, "Llama-2-7b": 6_738_415_616, "Llama-3-8B-Instruct": 8_030_261_248}


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name: str) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = zoo.load(f"hf:{name}", seq=256).build()
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


def test_published_names() -> None:
    assert set(zoo.published_names()) == set(SIZES)
    alias = zoo.published_config("meta-llama/Meta-Llama-3-8B-Instruct")
    assert alias is not None and alias.stem == "Llama-3-8B-Instruct"
    assert zoo.published_config("/data/phi-1_5") is None  # a path means itself
    assert zoo.published_config("Llama-2-70b") is None


# Samples


def samples(width: int) -> InstructionDataset:
    return InstructionDataset([InstructionRecord("Say it.", "Yes.")], ByteTokenizer(), width)


def test_only_the_answer_is_predicted() -> None:
    record = InstructionRecord("Say it.", "Yes.", "Loudly.")
    tokens, targets = samples(512).tokenize(record)
    prompt = record.prompt.encode()
    assert bytes(tokens[: len(prompt) + 4]) == prompt + b"Yes."
    assert b"### Input:\nLoudly.\n\n### Response:\n" in prompt
    assert b"### Input" not in InstructionRecord("Say it.", "Yes.").prompt.encode()
    assert targets[: len(prompt) - 1] == [IGNORE_INDEX] * (len(prompt) - 1)
    assert targets[len(prompt) - 1 : len(prompt) + 4] == [*b"Yes.", ByteTokenizer.eos_id]  # the last prompt token predicts the first of the answer
    assert set(targets[len(prompt) + 4 :]) == {IGNORE_INDEX}
    assert (len(tokens), len(targets)) == (512, 512)


@pytest.mark.parametrize("room", range(-3, 8))
def test_what_is_too_long_is_cut_and_something_is_left_to_predict(room: int) -> None:
    record = InstructionRecord("Say it.", "Yes.")
    width = len(record.prompt) + room
    tokens, targets = samples(width).tokenize(record)
    kept = [t for t in targets if t != IGNORE_INDEX]
    assert (len(tokens), len(targets)) == (width, width)
    assert kept == [*b"Yes.", ByteTokenizer.eos_id][: max(room, 1)]
    for place, target in enumerate(targets[:-1]):
        assert target in (IGNORE_INDEX, tokens[place + 1])


def test_a_batch_has_a_fixed_shape(here: Path) -> None:
    found = load_dataset(translated("ddp", model_id="tiny"), load_task(translated("ddp", model_id="tiny")), "train")
    batch = found.batch(torch.tensor([3, 0]))
    assert len(found) == 20
    assert {name: tuple(values.shape) for name, values in batch.items()} == {"tokens": (2, 256), "targets": (2, 256)}
    assert all(values.dtype == torch.int64 for values in batch.values())


def test_a_tokenizer_of_its_own(here: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<end>", "<unk>", "Say", "it", ".", "Yes"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<unk>").save_pretrained("tiny")
    found = find_tokenizer(Path("tiny"))
    assert (found.encode("Say it. Yes"), found.eos_id, found.vocab_size) == ([2, 3, 4, 5], 0, 6)
    _, targets = InstructionDataset([], found, 64).tokenize(InstructionRecord("Say it.", "Yes."))
    assert [t for t in targets if t != IGNORE_INDEX] == [5, 4, 0]
    assert isinstance(find_tokenizer(None), ByteTokenizer)
    fields = {name: Field((64,), "int64", 5) for name in ("tokens", "targets")}
    with pytest.raises(RequestError, match="the tokenizer in tiny needs a vocabulary of 6, and the model's is 5"):
        load_instructions(Path("x.json"), fields, "train", tokenizer=Path("tiny"))


def test_without_a_tokenizer_bytes_are_tokens(here: Path) -> None:
    assert ByteTokenizer().encode("né") == [110, 195, 169]
    (here / "tiny" / "config.json").write_text(json.dumps({**TINY, "vocab_size": 255}))
    with pytest.raises(RequestError, match=r"bytes are tokens, which need a vocabulary of 256, and the model's is 255"):
        resolve_job(translated("ddp", model_id="tiny", global_batch=8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "expected a JSON list of objects with instruction, input and output"),
        ("[]", "expected a JSON list"),
        ('[{"instruction": "a", "output": "b"}, 3]', "x.json: record 1 is not an object"),
        ('[{"instruction": "a", "text": "b"}]', "record 0 has no 'output'; it has instruction, text"),
        ('[{"instruction": "a", "output": 3}]', "record 0: 'output' must be a text, not int"),
        ("[", "x.json:1: not JSON"),
    ],
)
def test_data_that_is_not_instructions(content: str, message: str, here: Path) -> None:
    (here / "x.json").write_text(content)
    with pytest.raises(RequestError, match=message):
        resolve_job(translated("ddp", model_id="tiny"))


def test_a_part_is_held_out_only_to_validate(here: Path) -> None:
    config = RunConfig(model="gpt-tiny", data="x.json")
    task = load_task(config)
    assert (len(load_dataset(config, task, "train")), len(load_dataset(config, task, "validation"))) == (19, 1)
    with pytest.raises(RequestError, match="cnn is neither"):
        load_task(RunConfig(model="cnn", data="x.json"))
    with pytest.raises(RequestError, match=r"no/x.json: No such file"):
        data.load("no/x.json", task.fields)


# Training


@pytest.mark.parametrize("model", ["gpt-tiny", "hf:tiny"])
def test_the_loss_is_a_sum_and_a_count(model: str, here: Path) -> None:
    if model.startswith("hf:"):
        pytest.importorskip("transformers")
    task = load_task(RunConfig(model=model, seq=48, data="x.json"))
    torch.manual_seed(0)
    network = task.build()
    tokens = torch.randint(0, 256, (3, 48))
    targets = torch.full((3, 48), IGNORE_INDEX)
    targets[0, 10:20], targets[2, 40:41] = 7, 9
    total, count = task.loss(network, {"tokens": tokens, "targets": targets})
    logits = network(tokens)
    chosen = torch.log_softmax(logits if torch.is_tensor(logits) else logits.logits, -1)
    assert int(count) == 11
    assert total.item() == pytest.approx(-(chosen[0, 10:20, 7].sum() + chosen[2, 40, 9]).item(), rel=1e-5)


def test_padding_does_not_reach_the_answer(here: Path) -> None:
    pytest.importorskip("transformers")
    task = load_task(RunConfig(model="hf:tiny", seq=48, data="x.json"))
    network, targets = task.build(), torch.full((1, 48), IGNORE_INDEX)
    targets[0, 5:9] = 3
    first = torch.randint(0, 256, (1, 48))
    second = torch.where(torch.arange(48) < 9, first, 1)
    losses = [task.loss(network, {"tokens": t, "targets": targets})[0].item() for t in (first, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_epochs_become_steps(here: Path) -> None:
    config = translated("ddp", model_id="tiny", global_batch=8)
    settled, _ = resolve_job(config.model_copy(update={"epochs": 3}))
    assert (settled.steps, settled.epochs) == (6, None)  # 20 samples make two whole batches of 8 a pass
    assert resolve_job(translated("ddp", model_id="tiny", steps=5))[0].steps == 5
    with pytest.raises(RequestError, match=r"x.json has 20 samples, less than one global batch of 128: use --global-batch 20 or less"):
        resolve_job(translated("ddp", model_id="tiny"))
    assert resolve_job(RunConfig(model="dlrm-tiny", epochs=2))[0].steps == 2 * (4096 // 64)  # any run may count in epochs


def test_warm_up_then_cosine() -> None:
    def rate(step: int, schedule: str = "cosine") -> float:
        return learning_rate(step, peak=2.0, warmup=100, steps=300, schedule=schedule)

    assert [rate(0), rate(49), rate(99)] == pytest.approx([2 / 101, 100 / 101, 200 / 101])
    assert [rate(100), rate(150), rate(200), rate(300)] == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 0.0])
    assert rate(299) > 0
    assert [rate(50, "constant"), rate(100, "constant"), rate(299, "constant")] == pytest.approx([102 / 101, 2.0, 2.0])


def test_the_printed_line() -> None:
    record = {"step": 11, "step_s": 0.8123, "learning_rate": 1.188e-6, "loss": 2.34561, "memory_bytes": 5_120_000_000, "grad_norm": 3.21}
    assert format_step_line(record, 404) == "12/404, 812.3 ms, lr 1.19e-06, loss 2.3456, 5.12 GB, grad norm 3.210"
    assert format_step_line({**record, "grad_norm": None}, None).endswith("grad norm –")

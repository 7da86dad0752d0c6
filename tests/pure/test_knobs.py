"""The table of knobs: it is complete, its values arrive in the constraints, and a given plan is held against them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from meshwright.core.errors import RequestError
from meshwright.core.mesh import Mesh
from meshwright.core.plan import MemoryPolicy, Plan, SyncPolicy
from meshwright.orchestrate import RunConfig
from meshwright.orchestrate.knobs import KNOBS, check_given, constraints_from_config, script_config, script_environment
from meshwright.plan import Constraints

# Fields of RunConfig that constrain no plan. A new field belongs here or into the table of knobs.
NO_KNOBS = {
    "model", "random_init", "steps", "epochs", "global_batch", "seq", "seed", "dropout", "data", "data_dir", "optimizer", "learning_rate",
    "weight_decay", "betas", "adam_eps", "lr_schedule", "warmup_steps", "clip", "validate_every", "validate_batches", "plan", "strategy", "devices",
    "cluster", "precision", "objective", "price", "watts", "run_dir", "name", "log_interval", "profile", "tensorboard", "prometheus_port",
    "hang_s", "inject",
    "on_nan", "digest", "verify", "checkpoint_every", "keep_checkpoints", "keep_every", "mtbf_h", "resume", "init_from", "allow_changes", "export",
    "snapshot_every", "max_restarts",
}  # fmt: skip
FOUND_LATER = {"routes", "nodes", "reorder", "flow"}  # constraints that no user writes: they follow from measurements and from the model

VALUES: dict[str, tuple[Any, dict[str, Any]]] = {  # key → what a user writes, and what is then fixed
    "nproc": (2, {"world": 2}),
    "mesh": ("dp=2, tp=2", {"mesh": Mesh(dp=2, tp=(2,))}),
    "zero": (0, {"zero": 0}),
    "recompute": ("full", {"recompute": "full"}),
    "micro_batches": (4, {"micro_batches": 4}),
    "backend": ("auto", {}),
    "compile": ("none", {"compile": "none"}),
    "schedule": ("gpipe", {"schedule": "gpipe"}),
    "placements": ({"head": "replicate"}, {"placements": {"head": "replicate"}}),
    "recompute_layers": ({"block": "none"}, {"recompute_layers": {"block": "none"}}),
    "sequence": (False, {"sequence": False}),
    "order": ("dp, pp", {"order": ("dp", "pp")}),
    "offload": ("optimizer", {"offload": "optimizer"}),
    "compression": ("auto", {"allow": ("bf16", "powersgd")}),
    "compression_rank": (2, {"compression_rank": 2}),
    "bucket_mb": (0.5, {"bucket_bytes": 2**19}),
    "overlap": ([], {"overlap": ()}),
    "timeout_s": (7.0, {"timeout_s": 7.0}),
    "spatial": ("2x1", {"spatial": (2, 1)}),
    "samples": ("together", {"samples": "together"}),
    "batchnorm": ("sync", {"batch_norm": "sync"}),
}  # fmt: skip


def test_every_field_of_a_configuration_is_a_knob_or_none_of_the_plans() -> None:
    knobs = {knob.key for knob in KNOBS}
    assert not knobs & NO_KNOBS
    assert knobs | NO_KNOBS == set(RunConfig.model_fields)
    assert knobs == set(VALUES)


def test_every_constraint_is_fixed_by_one_knob() -> None:
    assert sorted([*(knob.field for knob in KNOBS), *FOUND_LATER]) == sorted(f.name for f in fields(Constraints))


@pytest.mark.parametrize("key", VALUES)
def test_what_a_user_writes_is_what_is_fixed(key: str) -> None:
    written, fixed = VALUES[key]
    assert constraints_from_config(RunConfig(**{key: written})) == Constraints(**{"timeout_s": 120.0, **fixed})


@pytest.mark.parametrize("key", VALUES)
def test_a_script_is_told_every_knob_of_its_plan(key: str) -> None:
    config = RunConfig(**{key: VALUES[key][0]})
    if config.backend == "auto":
        with pytest.raises(RequestError, match="backend=auto"):
            script_environment(config)
    elif key != "nproc":  # which says how many ranks are started
        assert constraints_from_config(script_config(script_environment(config), {})) == constraints_from_config(config)


def test_verification_can_be_switched_off_for_a_script_and_beside_a_given_plan() -> None:
    config = RunConfig(verify="off", plan="plan.json")
    assert not config.verify
    assert not script_config(script_environment(config), {}).verify
    assert script_config({}, {}).verify


PLAN = Plan(
    "vae", 64, Mesh(dp=2, pp=2, order=("dp", "pp")), 4, schedule="gpipe", memory=MemoryPolicy(units=("block",), layers={"block": "full"}),
    sync=SyncPolicy(compression="bf16"), placements={"head": "replicate"},
)  # fmt: skip
HELD: dict[str, tuple[Any, Any, str]] = {  # key → what PLAN holds, what it does not, and how that is said
    "nproc": (4, 2, "has nproc 4, the request 2"),
    "mesh": ("dp=2,pp=2", "dp=4", "has mesh pp=2,dp=2, the request dp=4"),
    "zero": (0, 1, "has zero 0, the request 1"),
    "recompute": ("none", "full", "has recompute none, the request full"),
    "micro_batches": (4, 2, "has micro_batches 4, the request 2"),
    "backend": ("gloo", "nccl", "has backend gloo, the request nccl"),
    "compile": ("none", "model", "has compile none, the request model"),
    "schedule": ("gpipe", "1f1b", "has schedule gpipe, the request 1f1b"),
    "placements": ({"head": "replicate"}, {"head": "column"}, "has placements {'head': 'replicate'}, the request {'head': 'column'}"),
    "recompute_layers": ({"block": "full"}, {"block": "none"}, "has recompute_layers {'block': 'full'}, the request {'block': 'none'}"),
    "sequence": (False, True, "has sequence False, the request True"),
    "order": ("dp,pp", "pp,dp", "has order dp,pp, the request pp,dp"),
    "offload": ("none", "optimizer", "has offload none, the request optimizer"),
    "compression": ("bf16", "none", "has compression bf16, the request none"),
    "compression_rank": (4, 2, "has compression_rank 4, the request 2"),
    "samples": ("apart", "together", "has samples apart, the request together"),
    "batchnorm": ("local", "sync", "has batchnorm local, the request sync"),
}


@pytest.mark.parametrize("key", [knob.key for knob in KNOBS if knob.in_plan is not None])
def test_a_given_plan_holds_what_is_asked(key: str) -> None:
    held, other, said = HELD[key]
    check_given(PLAN, RunConfig(plan="p.json", **{key: held}))
    with pytest.raises(RequestError) as refused:
        check_given(PLAN, RunConfig(plan="p.json", **{key: other}))
    assert str(refused.value) == f"p.json {said}: change one of them"


def test_a_script_fixes_what_set_fixes_and_the_command_that_starts_it_wins() -> None:
    handed_on = script_environment(RunConfig(zero=3))
    config = script_config(handed_on, {"precision": "bf16", "mesh": "shard=2", "zero": 1})
    assert (config.precision, config.mesh, config.zero) == ("bf16", "shard=2", 3)
    with pytest.raises(RequestError, match="unknown key 'presision' in prepare; did you mean 'precision'"):
        script_config({}, {"presision": "bf16"})
    with pytest.raises(RequestError, match="prepare: zero"):
        script_config({}, {"zero": 7})

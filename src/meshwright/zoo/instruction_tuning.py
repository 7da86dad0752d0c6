"""Instruction tuning of a language model's task: the same model, with samples that give the target token at each position, or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.core.errors import RequestError
from meshwright.core.task import Field, Loss, Task
from meshwright.zoo import huggingface, losses

_ANSWER_LOSSES: Mapping[Loss, Loss] = {losses.next_token_loss: losses.answer_token_loss, huggingface.causal_loss: huggingface.answer_token_loss}


def instruction_task(task: Task) -> Task:
    """`task` on instructions and answers. Its loss is (sum, count) over the answers' tokens, so every token weighs the same on all ranks."""
    counted = _ANSWER_LOSSES.get(task.loss)
    if counted is None or task.tokens_per_sample is None:
        raise RequestError(f"instructions and answers need a language model of the zoo or an hf: model; {task.name} is neither: leave --data out")
    tokens = Field((task.tokens_per_sample,), "int64", task.fields["tokens"].high)
    return replace(task, loss=counted, fields={"tokens": tokens, "targets": tokens}, data="")
